--- llmrun run: one prompt, one answer, streamed.

local common = require "llmrun.cli.common"
local args = require "llmrun.cli.args"

local M = {
    summary = "answers one prompt",
    usage = "[-m MODEL] -p TEXT [FLAGS...]",
    model = true,
    help = "Puts TEXT as a user's message into the model's chat template and prints the answer as it comes.",
    examples = [[
        llmrun run -p "Name a prime above 100."
        llmrun run -m qwen-0.5b -p @question.txt --temperature 0 -n 200
        git diff | llmrun run -m qwen-1.5b --system "Write a commit message." -p -
        llmrun run -m qwen-1.5b --draft qwen-0.5b -p "Write a Python function that reverses a list."
        llmrun run --raw -p "The capital of France is" -n 8]],
    flags = common.flags({
        { "prompt", short = "p", arg = "TEXT", help = "the prompt; @FILE reads a file, - standard input" },
        { "system", short = "s", arg = "TEXT", help = "system message" },
        { "raw", help = "continues the plain text, without a chat template" },
        common.template_flag,
        common.record_flag,
        { "stats", help = "prints tokens, times and memory to standard error at the end" },
        { "trace", arg = "FILE", help = "writes a trace of the engine's steps (open it in Perfetto)" },
    }, common.sampling_flags),
}

function M.run(o)
    if not o.prompt then args.fail("no prompt; give one with -p (see llmrun run --help)", 2) end
    local model <close> = common.load(o, { template = common.template(o.template), speculate = common.drafts(o) })
    if not o.raw then common.check_chat(model, ", or continue plain text with --raw") end
    local s <close> = model:session()
    common.guard(function()
        local text = common.text_of(o.prompt)
        if o.raw then
            s:append(text)
        else
            if o.system then s:system(o.system) end
            s:user(text)
        end
        for piece in s:stream(common.sampling(o, model)) do
            io.stdout:write(piece)
            io.stdout:flush()
        end
    end)
    io.stdout:write("\n")
    io.stdout:flush()
    if o.trace then common.guard(model.trace, model, nil) end -- it ends here, or says why it can't
    if o.stats then io.stderr:write(common.stats_line(model, s.result), "\n") end
    return 0
end

return M
