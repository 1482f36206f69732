/* lua_grammar.c - binds the grammar builder and regular expressions; lua/llmrun/grammar makes grammars of texts with
 * them. Matchers are in lua_matcher.c.
 *
 * A builder's methods raise when the grammar breaks a limit or a rule; builder:error() then gives text and code.
 */
#include "base/mem.h"
#include "lua/lua_grammar_int.h"
#include <string.h>

/* ---- regular expressions ---- */

#define REGEX "llmrun.regex"

static int regex_close(lua_State *L)
{
    lr_regex **r = luaL_checkudata(L, 1, REGEX);
    lr_regex_free(*r);
    *r = NULL;
    return 0;
}

static lr_regex *check_regex(lua_State *L, int idx) { return *(lr_regex **)lr_lua_check_open(L, idx, REGEX, "regex"); }

static lr_regex **new_regex(lua_State *L)
{
    lr_regex **r = lua_newuserdatauv(L, sizeof *r, 0);
    *r = NULL;
    luaL_setmetatable(L, REGEX);
    return r;
}

/* regex(pattern, { search =, icase =, dotall = }) -> regex; nil, text, code */
static int core_regex(lua_State *L)
{
    size_t n;
    const char *s = luaL_checklstring(L, 1, &n);
    unsigned flags = (lr_lua_opt_bool(L, 2, "search", false) ? LR_RE_SEARCH : 0u) |
                     (lr_lua_opt_bool(L, 2, "icase", false) ? LR_RE_ICASE : 0u) |
                     (lr_lua_opt_bool(L, 2, "dotall", false) ? LR_RE_DOTALL : 0u);
    lr_error err;
    lr_regex **r = new_regex(L);
    return lr_regex_new(r, s, n, flags, &err) ? lr_lua_fail(L, &err) : 1;
}

/* Strings of the list at idx, borrowed from it, in a userdata that is left on the stack. */
static const lr_str *check_strings(lua_State *L, int idx, size_t *n)
{
    luaL_checktype(L, idx, LUA_TTABLE);
    *n = (size_t)luaL_len(L, idx);
    lr_str *s = lua_newuserdatauv(L, (*n + 1) * sizeof *s, 0);
    for (size_t i = 0; i < *n; i++) {
        if (lua_rawgeti(L, idx, (lua_Integer)i + 1) != LUA_TSTRING)
            luaL_error(L, "string expected at %d of the list, got %s", (int)i + 1, luaL_typename(L, -1));
        s[i].s = lua_tolstring(L, -1, &s[i].n);
        lua_pop(L, 1);
    }
    return s;
}

/* regex_lits({strings}) -> regex; nil, text, code */
static int core_regex_lits(lua_State *L)
{
    size_t n;
    const lr_str *s = check_strings(L, 1, &n);
    lr_error err;
    lr_regex **r = new_regex(L);
    return lr_regex_lits(r, s, n, &err) ? lr_lua_fail(L, &err) : 1;
}

/* regex_multiple(p, k) -> the decimal numbers that are multiples of p / 10^k; nil, text, code */
static int core_regex_multiple(lua_State *L)
{
    lua_Integer p = luaL_checkinteger(L, 1), k = luaL_checkinteger(L, 2);
    luaL_argcheck(L, p > 0 && p < 1 << 30, 1, "out of range");
    luaL_argcheck(L, k >= 0 && k < 1 << 16, 2, "out of range");
    lr_error err;
    return lr_regex_multiple(new_regex(L), (uint32_t)p, (uint32_t)k, &err) ? lr_lua_fail(L, &err) : 1;
}

/* a:both(b), a:either(b) -> regex; nil, text, code */
static int regex_both(lua_State *L)
{
    lr_regex *a = check_regex(L, 1), *b = check_regex(L, 2);
    lr_error err;
    return lr_regex_and(new_regex(L), a, b, &err) ? lr_lua_fail(L, &err) : 1;
}

static int regex_either(lua_State *L)
{
    lr_regex *a = check_regex(L, 1), *b = check_regex(L, 2);
    lr_error err;
    return lr_regex_or(new_regex(L), a, b, &err) ? lr_lua_fail(L, &err) : 1;
}

/* a:none() -> the texts that are not in a; nil, text, code */
static int regex_none(lua_State *L)
{
    lr_regex *a = check_regex(L, 1);
    lr_error err;
    return lr_regex_not(new_regex(L), a, &err) ? lr_lua_fail(L, &err) : 1;
}

static int32_t check_count(lua_State *L, int idx, lua_Integer def)
{
    lua_Integer v = luaL_optinteger(L, idx, def);
    luaL_argcheck(L, v >= -1 && v <= 1 << 30, idx, "out of range");
    return (int32_t)v;
}

/* a:length(min, max or -1) -> regex; nil, text, code */
static int regex_length(lua_State *L)
{
    lr_regex *a = check_regex(L, 1);
    int32_t min = check_count(L, 2, 0), max = check_count(L, 3, -1);
    lr_error err;
    return lr_regex_length(new_regex(L), a, min, max, &err) ? lr_lua_fail(L, &err) : 1;
}

typedef struct word_list {
    lua_State *L;
    lua_Integer n;
} word_list;

static void add_word(void *user, lr_str word)
{
    word_list *l = user;
    lua_pushlstring(l->L, word.s, word.n);
    lua_rawseti(l->L, -2, ++l->n);
}

/* a:words(most) -> a list of its texts, false if there are more; nil, text, code */
static int regex_words(lua_State *L)
{
    word_list l = {.L = L};
    bool all = false;
    lr_error err;
    lr_regex *r = check_regex(L, 1);
    lua_Integer most = luaL_checkinteger(L, 2);
    luaL_argcheck(L, most >= 0 && most <= 1 << 20, 2, "out of range");
    lua_newtable(L);
    if (lr_regex_words(r, (size_t)most, add_word, &l, &all, &err)) return lr_lua_fail(L, &err);
    if (!all) lua_pushboolean(L, false);
    return 1;
}

static int push_answer(lua_State *L, int rc, bool yes, const lr_error *err)
{
    if (rc) return lr_lua_fail(L, err);
    lua_pushboolean(L, yes);
    return 1;
}

/* a:is_empty(), a:overlaps(b), a:matches(text) -> boolean; nil, text, code */
static int regex_is_empty(lua_State *L)
{
    bool yes = false;
    lr_error err;
    int rc = lr_regex_is_empty(check_regex(L, 1), &yes, &err);
    return push_answer(L, rc, yes, &err);
}

static int regex_overlaps(lua_State *L)
{
    bool yes = false;
    lr_error err;
    int rc = lr_regex_overlaps(check_regex(L, 1), check_regex(L, 2), &yes, &err);
    return push_answer(L, rc, yes, &err);
}

static int regex_matches(lua_State *L)
{
    bool yes = false;
    size_t n;
    lr_error err;
    lr_regex *r = check_regex(L, 1);
    const char *s = luaL_checklstring(L, 2, &n);
    int rc = lr_regex_matches(r, s, n, &yes, &err);
    return push_answer(L, rc, yes, &err);
}

/* ---- builder ---- */

#define BUILDER "llmrun.grammar_builder"

static int builder_close(lua_State *L)
{
    lr_gb **b = luaL_checkudata(L, 1, BUILDER);
    lr_gb_free(*b);
    *b = NULL;
    return 0;
}

static lr_gb *check_builder(lua_State *L) { return *(lr_gb **)lr_lua_check_open(L, 1, BUILDER, "grammar builder"); }

/* grammar_builder() -> builder */
static int core_builder(lua_State *L)
{
    lr_gb **b = lua_newuserdatauv(L, sizeof *b, 0);
    *b = NULL;
    luaL_setmetatable(L, BUILDER);
    lr_error err;
    return lr_gb_new(b, &err) ? lr_lua_fail(L, &err) : 1;
}

/* Pushes a node, or raises the builder's error. */
static int give(lua_State *L, const lr_gb *b, lr_gnode node)
{
    const lr_error *err = lr_gb_error(b);
    if (err) return luaL_error(L, "%s", err->text);
    lua_pushinteger(L, node);
    return 1;
}

static lr_gnode check_node(lua_State *L, int idx)
{
    lua_Integer v = luaL_checkinteger(L, idx);
    luaL_argcheck(L, v > 0 && v <= UINT32_MAX, idx, "no node of a grammar");
    return (lr_gnode)v;
}

/* Integers of the list at idx in a userdata that is left on the stack. */
static const uint32_t *check_u32s(lua_State *L, int idx, size_t *n)
{
    luaL_checktype(L, idx, LUA_TTABLE);
    *n = (size_t)luaL_len(L, idx);
    uint32_t *v = lua_newuserdatauv(L, (*n + 1) * sizeof *v, 0);
    for (size_t i = 0; i < *n; i++) {
        int ok;
        lua_rawgeti(L, idx, (lua_Integer)i + 1);
        lua_Integer x = lua_tointegerx(L, -1, &ok);
        if (!ok || x < 0 || x > UINT32_MAX) luaL_error(L, "no such number at %d of the list", (int)i + 1);
        v[i] = (uint32_t)x;
        lua_pop(L, 1);
    }
    return v;
}

static int builder_empty(lua_State *L)
{
    lr_gb *b = check_builder(L);
    return give(L, b, lr_gb_empty(b));
}

static int builder_never(lua_State *L)
{
    lr_gb *b = check_builder(L);
    return give(L, b, lr_gb_never(b));
}

/* b:lit(text) -> node */
static int builder_lit(lua_State *L)
{
    lr_gb *b = check_builder(L);
    size_t n;
    const char *s = luaL_checklstring(L, 2, &n);
    return give(L, b, lr_gb_lit(b, s, n));
}

/* b:bytes(text) -> a node for one of the text's bytes */
static int builder_bytes(lua_State *L)
{
    lr_gb *b = check_builder(L);
    size_t n;
    const char *s = luaL_checklstring(L, 2, &n);
    uint64_t set[4] = {0};
    for (size_t i = 0; i < n; i++) set[(uint8_t)s[i] >> 6] |= (uint64_t)1 << ((uint8_t)s[i] & 63);
    return give(L, b, lr_gb_bytes(b, set));
}

static lr_spell check_spell(lua_State *L, int idx)
{
    static const char *const names[] = {"raw", "json", NULL};
    return (lr_spell)luaL_checkoption(L, idx, "raw", names);
}

/* b:chars({lo, hi, lo, hi ...}, "raw" or "json") -> a node for one character */
static int builder_chars(lua_State *L)
{
    lr_gb *b = check_builder(L);
    lr_spell spell = check_spell(L, 3);
    size_t n;
    const uint32_t *v = check_u32s(L, 2, &n);
    luaL_argcheck(L, n % 2 == 0, 2, "pairs expected");
    return give(L, b, lr_gb_chars(b, (const uint32_t(*)[2])v, n / 2, spell));
}

static int builder_seq(lua_State *L)
{
    lr_gb *b = check_builder(L);
    size_t n;
    const uint32_t *v = check_u32s(L, 2, &n);
    return give(L, b, lr_gb_seq(b, v, n));
}

static int builder_alt(lua_State *L)
{
    lr_gb *b = check_builder(L);
    size_t n;
    const uint32_t *v = check_u32s(L, 2, &n);
    return give(L, b, lr_gb_alt(b, v, n));
}

/* b:rep(node, min, max or -1) -> node */
static int builder_rep(lua_State *L)
{
    lr_gb *b = check_builder(L);
    lr_gnode node = check_node(L, 2);
    int32_t min = check_count(L, 3, 0), max = check_count(L, 4, -1);
    return give(L, b, lr_gb_rep(b, node, min, max));
}

static int builder_lits(lua_State *L)
{
    lr_gb *b = check_builder(L);
    size_t n;
    const lr_str *s = check_strings(L, 2, &n);
    return give(L, b, lr_gb_lits(b, s, n));
}

/* b:graph(places, {from, to, node, from, to, node ...}) -> node; places count from 0, the last is the end */
static int builder_graph(lua_State *L)
{
    lr_gb *b = check_builder(L);
    lua_Integer places = luaL_checkinteger(L, 2);
    luaL_argcheck(L, places > 0 && places < 1 << 30, 2, "out of range");
    size_t n;
    const uint32_t *v = check_u32s(L, 3, &n);
    luaL_argcheck(L, n % 3 == 0, 3, "edges of three numbers expected");
    lr_gedge *e = lua_newuserdatauv(L, (n / 3 + 1) * sizeof *e, 0);
    for (size_t i = 0; i < n / 3; i++) e[i] = (lr_gedge){v[3 * i], v[3 * i + 1], v[3 * i + 2]};
    return give(L, b, lr_gb_graph(b, (uint32_t)places, e, n / 3));
}

/* b:rule(name) -> rule */
static int builder_rule(lua_State *L)
{
    lr_gb *b = check_builder(L);
    size_t n;
    const char *s = luaL_checklstring(L, 2, &n);
    return give(L, b, lr_gb_rule(b, s, n));
}

static uint32_t check_rule(lua_State *L, int idx)
{
    lua_Integer v = luaL_checkinteger(L, idx);
    luaL_argcheck(L, v >= 0 && v <= UINT32_MAX, idx, "no rule of a grammar");
    return (uint32_t)v;
}

/* b:define(rule, node) */
static int builder_define(lua_State *L)
{
    lr_gb *b = check_builder(L);
    lr_gb_define(b, check_rule(L, 2), check_node(L, 3));
    (void)give(L, b, 0);
    return 0;
}

/* b:keep(rule): called, never copied */
static int builder_keep(lua_State *L)
{
    lr_gb_keep(check_builder(L), check_rule(L, 2));
    return 0;
}

/* b:unique(rule): it matches one item of a JSON array or one name of a JSON object, and none twice */
static int builder_unique(lua_State *L)
{
    lr_gb_unique(check_builder(L), check_rule(L, 2));
    return 0;
}

/* b:mark(text): JSON documents stand behind this, in free text */
static int builder_mark(lua_State *L)
{
    size_t n;
    const char *s = luaL_checklstring(L, 2, &n);
    lr_gb_mark(check_builder(L), s, n);
    return 0;
}

static int builder_ref(lua_State *L)
{
    lr_gb *b = check_builder(L);
    return give(L, b, lr_gb_ref(b, check_rule(L, 2)));
}

/* b:hole(id, name) -> node */
static int builder_hole(lua_State *L)
{
    lr_gb *b = check_builder(L);
    lua_Integer id = luaL_checkinteger(L, 2);
    size_t n;
    const char *s = luaL_checklstring(L, 3, &n);
    luaL_argcheck(L, id >= 0 && id < 1 << 30, 2, "out of range");
    return give(L, b, lr_gb_hole(b, (int)id, s, n));
}

/* b:regex(regex, "raw" or "json") -> node */
static int builder_regex(lua_State *L)
{
    lr_gb *b = check_builder(L);
    lr_regex *r = check_regex(L, 2);
    return give(L, b, lr_gb_regex(b, r, check_spell(L, 3)));
}

/* b:error() -> text, code of the first error; nothing if there is none */
static int builder_error(lua_State *L)
{
    const lr_error *err = lr_gb_error(check_builder(L));
    if (!err) return 0;
    lua_pushstring(L, err->text);
    lua_pushstring(L, lr_error_name(err->code));
    return 2;
}

/* b:compile(rule) -> grammar; nil, text, code */
static int builder_compile(lua_State *L)
{
    lr_gb *b = check_builder(L);
    uint32_t rule = check_rule(L, 2);
    lr_grammar **g = lua_newuserdatauv(L, sizeof *g, 0);
    *g = NULL;
    luaL_setmetatable(L, LR_LUA_GRAMMAR);
    lr_error err;
    return lr_gb_compile(b, rule, g, &err) ? lr_lua_fail(L, &err) : 1;
}

/* ---- grammars ---- */

static int grammar_close(lua_State *L)
{
    lr_grammar **g = luaL_checkudata(L, 1, LR_LUA_GRAMMAR);
    lr_grammar_unref(*g);
    *g = NULL;
    return 0;
}

lr_grammar *lr_lua_check_grammar(lua_State *L, int idx)
{
    return *(lr_grammar **)lr_lua_check_open(L, idx, LR_LUA_GRAMMAR, "grammar");
}

static void set_int(lua_State *L, const char *name, uint64_t v)
{
    lua_pushinteger(L, (lua_Integer)v);
    lua_setfield(L, -2, name);
}

/* g:info() -> { rules, states, holes, dfa, frames, bytes, walked } */
static int grammar_info(lua_State *L)
{
    lr_grammar_info i;
    lr_grammar_get_info(lr_lua_check_grammar(L, 1), &i);
    lua_createtable(L, 0, 7);
    set_int(L, "rules", i.n_rules);
    set_int(L, "states", i.n_states);
    set_int(L, "holes", i.n_holes);
    set_int(L, "dfa", i.n_dfa);
    set_int(L, "frames", i.n_frames);
    set_int(L, "bytes", i.bytes);
    set_int(L, "walked", i.walked);
    return 1;
}

void lr_lua_open_grammar(lua_State *L)
{
    static const luaL_Reg regex_methods[] = {
        {"both", regex_both},       {"either", regex_either},     {"none", regex_none},
        {"length", regex_length},   {"is_empty", regex_is_empty}, {"overlaps", regex_overlaps},
        {"matches", regex_matches}, {"words", regex_words},       {NULL, NULL}};
    static const luaL_Reg builder_methods[] = {
        {"empty", builder_empty}, {"never", builder_never},     {"lit", builder_lit},
        {"bytes", builder_bytes}, {"chars", builder_chars},     {"seq", builder_seq},
        {"alt", builder_alt},     {"rep", builder_rep},         {"lits", builder_lits},
        {"graph", builder_graph}, {"rule", builder_rule},       {"define", builder_define},
        {"keep", builder_keep},   {"unique", builder_unique},   {"mark", builder_mark},
        {"ref", builder_ref},     {"hole", builder_hole},       {"regex", builder_regex},
        {"error", builder_error}, {"compile", builder_compile}, {NULL, NULL}};
    static const luaL_Reg grammar_methods[] = {{"info", grammar_info}, {NULL, NULL}};
    lr_lua_class(L, REGEX, regex_methods, regex_close);
    lr_lua_class(L, BUILDER, builder_methods, builder_close);
    lr_lua_class(L, LR_LUA_GRAMMAR, grammar_methods, grammar_close);
    static const luaL_Reg functions[] = {{"regex", core_regex},
                                         {"regex_lits", core_regex_lits},
                                         {"regex_multiple", core_regex_multiple},
                                         {"grammar_builder", core_builder},
                                         {NULL, NULL}};
    luaL_setfuncs(L, functions, 0);
    lr_lua_open_matcher(L);
}
