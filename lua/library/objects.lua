---@meta
-- luacheck: ignore
-- Objects made in C (src/lua), for editors: written by hand, and held against what C has by tests/spec/library_spec.lua.
-- All that is written in Lua has its stubs beside this file, made by scripts/gen_library.lua from doc comments.

--- A row of logits: the whole vocabulary, or the candidates that a narrowing stage left. A token that is no candidate
--- has logit -inf and stays so. Dead once anything waits.
---@class llmrun.Logits
local Logits = {}

--- The logit of a token, or a list of those of several.
---@param id integer|integer[]
---@return number|number[]
function Logits:get(id) end

--- The most probable token (the lowest id of equals) and its logit; nil if nothing can be drawn.
---@return integer? id, number? logit
function Logits:argmax() end

--- The k best tokens and their logits, best first, without those that can't be drawn.
---@param k integer
---@return integer[] ids, number[] logits
function Logits:topk(k) end

--- The logarithm of the sum of all exponentials.
---@return number
function Logits:logsumexp() end

--- The probability of a token, or a list of those of several.
---@param id integer|integer[]
---@return number|number[]
function Logits:softmax(id) end

--- The logarithm of it.
---@param id integer|integer[]
---@return number|number[]
function Logits:logprob(id) end

--- The distribution's entropy, in nats.
---@return number
function Logits:entropy() end

--- The token that a number in [0, 1) draws from the distribution.
---@param u number
---@return integer
function Logits:sample(u) end

--- The number of tokens of the vocabulary.
---@return integer
function Logits:vocab_size() end

--- Ids of a narrowed row, best first; nil if it is the whole vocabulary.
---@return integer[]?
function Logits:candidates() end

--- Logits of its own memory, which stay.
---@return llmrun.Logits
function Logits:copy() end

--- Adds x to these tokens; { [id] = x, ... }; or all of another row, times a weight (1).
---@param what integer|integer[]|table<integer, number>|llmrun.Logits
---@param x? number
function Logits:add(what, x) end

--- Multiplies all by f, scale(f), or those of some tokens, scale(id, f).
---@param what number|integer|integer[]
---@param f? number
function Logits:scale(what, f) end

--- These can't be drawn.
---@param id integer|integer[]
function Logits:mask(id) end

--- Only these can be drawn.
---@param id integer|integer[]
function Logits:keep(id) end

--- What a call of gen came to.
---@class llmrun.Result
---@field text string
---@field tokens integer[]
---@field finish_reason "stop"|"length"|"cancelled"
---@field stop? string the text of the option stop that ended it
---@field stop_token? integer the token that ended it
---@field value? any the value, with the option json
---@field seed integer
---@field logprobs? table[] with the option logprobs: { id, logprob, text, top? } of each token
---@field usage { prompt_tokens: integer, cached_tokens: integer, computed_tokens: integer, completion_tokens: integer }
---@field timing { queued: number, first_token?: number, total: number, tokens_per_second?: number, preempted: integer }
---@field speculation? table

--- A memory of token texts, for functions that draft: llm.memory.
---@class llmrun.Memory
local Memory = {}

--- Adds one text.
---@param ids integer[]
---@return llmrun.Memory
function Memory:add(ids) end

--- What followed the longest end of ids in it, at most k tokens, and that end's length.
---@param ids integer[]
---@param k integer
---@param min? integer tokens that must have stood before (2)
---@return integer[] ids, integer length
function Memory:propose(ids, k, min) end

--- Tokens in it.
---@return integer
function Memory:len() end

--- Frees it.
function Memory:close() end

--- What a function that is a stage of a sampler gets beside the logits. It lives as long as the request, and the function
--- may keep things in it.
---@class llmrun.SamplerContext
---@field position integer of the token to be drawn
---@field n_prompt integer tokens of the prompt
---@field n_generated integer tokens drawn so far
---@field last integer the token before
local SamplerContext = {}

--- The last n tokens drawn (all).
---@param n? integer
---@return integer[]
function SamplerContext:tokens(n) end

--- A random number in [0, 1) of the request's seed and this position.
---@param stream? integer another number for the same place
---@return number
function SamplerContext:uniform(stream) end

--- What a function that drafts gets.
---@class llmrun.DraftContext
---@field most integer tokens that there is room for
---@field batch integer requests that generate
---@field acceptance number of late, per token
---@field method string
---@field n_prompt integer
---@field n_generated integer
---@field last integer the last token
local DraftContext = {}

--- The last n generated tokens (all); all = true: prompt tokens too.
---@param n? integer
---@param all? boolean
---@return integer[]
function DraftContext:tokens(n, all) end

--- Seconds that a step of so many rows takes, and those of a pass of the draft model; 0: not known.
---@param rows integer
---@return number step, number draft
function DraftContext:cost(rows) end

--- A step, as the hooks schedule and preempt of a policy see it.
---@class llmrun.PolicyStep
---@field waiting llmrun.PolicyRequest[] in order of arrival; reused, so not to be kept
---@field running llmrun.PolicyRequest[]
---@field budget integer rows left
---@field slots integer requests that may still start
---@field active integer that run now
---@field free_blocks integer
---@field block_size integer
---@field now number seconds
local PolicyStep = {}

--- Runs a request in this step: so many rows of its prompt at most. The rows granted; nil and why not.
---@param r llmrun.PolicyRequest
---@param rows? integer
---@return integer? granted, string? why
function PolicyStep:run(r, rows) end

--- Takes a running request's blocks back. True; nil and why not.
---@param r llmrun.PolicyRequest
---@param how? "recompute"|"swap"
---@return boolean? ok, string? why
function PolicyStep:preempt(r, how) end

--- Whether a waiting request would find room without preempting.
---@param r llmrun.PolicyRequest
---@return boolean
function PolicyStep:fits(r) end

--- The built-in rule takes the rest.
function PolicyStep:default() end

--- KV blocks that are free or could be had from the cache; of the first group, unless another is named.
---@param group? integer
---@return integer
function PolicyStep:blocks(group) end

--- A list by key(request), least first.
---@param list llmrun.PolicyRequest[]
---@param key fun(r: llmrun.PolicyRequest): number
---@return llmrun.PolicyRequest[]
function PolicyStep:sorted(list, key) end

--- A request, as policies see it. Any other field is the policy's own, and lives as long as the request.
---@class llmrun.PolicyRequest
---@field id integer
---@field kind "generate"|"logits"|"score"
---@field state string
---@field tenant string
---@field tag any that the program gave it
---@field priority integer lower goes first
---@field deadline number
---@field arrival number
---@field queue_time number seconds waited so far
---@field prompt_tokens integer
---@field cached_tokens integer
---@field computed_tokens integer
---@field generated_tokens integer
---@field max_tokens integer
---@field pending integer tokens to compute before the next can be drawn
---@field granted integer rows in this step
---@field blocks integer KV blocks it holds
---@field block_seconds number
---@field preempted integer times
---@field seq any
local PolicyRequest = {}

--- Ends it.
function PolicyRequest:cancel() end

--- Tokens of its prompt that the cache holds.
---@return integer
function PolicyRequest:prefix() end

--- A number that prompts with the same first n tokens share.
---@param n integer
---@return integer
function PolicyRequest:head(n) end
