/* build.c - the builder: nodes, rules and byte sets of a language to be. See grammar.h. */
#include "grammar/grammar_int.h"
#include <stdio.h>

int lr_gb_new(lr_gb **out, lr_error *err)
{
    lr_gb *b = lr_calloc(1, sizeof *b);
    if (!b) return lr_fail(err, LR_ENOMEM, "no memory for a grammar");
    *out = b;
    if (lr_gb__grow(b, (void **)&b->node, &b->cap_node, 0, 1, sizeof *b->node)) {
        b->node[0] = (gnode){.kind = G_NEVER, .depth = 1};
        b->n_node = 1;
        return 0;
    }
    lr_gb_free(b);
    *out = NULL;
    return lr_fail(err, LR_ENOMEM, "no memory for a grammar");
}

void lr_gb_free(lr_gb *b)
{
    if (!b) return;
    for (uint32_t i = 0; i < b->n_rule; i++) lr_free(b->rule[i].name);
    lr_free(b->node);
    lr_free(b->list);
    lr_free(b->text);
    lr_free(b->lits);
    lr_free(b->set);
    lr_free(b->rule);
    lr_free(b->mark);
    lr_free(b);
}

const lr_error *lr_gb_error(const lr_gb *b) { return b->err.code ? &b->err : NULL; }

void lr_gb_fail(lr_gb *b, int code, const char *text)
{
    if (!b->err.code) lr_fail(&b->err, code, "%s", text);
}

bool lr_gb__grow(lr_gb *b, void **p, uint32_t *cap, uint32_t n, uint32_t more, size_t size)
{
    if (b->err.code) return false;
    uint64_t need = (uint64_t)n + more;
    if (need <= *cap) return true;
    uint64_t want = (uint64_t)*cap * 2 > need ? (uint64_t)*cap * 2 : need + 16;
    if (need > (1u << 28)) {
        lr_fail(&b->err, LR_ELIMIT, "the grammar is too large");
        return false;
    }
    void *q = lr_reallocarray(*p, want, size);
    if (!q) {
        lr_fail(&b->err, LR_ENOMEM, "no memory for the grammar");
        return false;
    }
    *p = q;
    *cap = (uint32_t)want;
    return true;
}

static lr_gnode add(lr_gb *b, gnode n)
{
    if (b->n_node >= LR_G_MAX_NODES) lr_gb_fail(b, LR_ELIMIT, "the grammar is too large");
    if (n.depth > LR_G_MAX_DEPTH) lr_gb_fail(b, LR_ELIMIT, "the grammar is nested too deeply");
    if (!lr_gb__grow(b, (void **)&b->node, &b->cap_node, b->n_node, 1, sizeof n)) return 0;
    b->node[b->n_node] = n;
    return b->n_node++;
}

static uint16_t depth_of(const lr_gb *b, lr_gnode n) { return n < b->n_node ? b->node[n].depth : 1; }

/* Children must be nodes of this builder. */
static bool check_nodes(lr_gb *b, const lr_gnode *nodes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (nodes[i] == 0 || nodes[i] >= b->n_node) lr_gb_fail(b, LR_EINVAL, "a node that is none of this grammar");
    }
    return !b->err.code;
}

lr_gnode lr_gb_empty(lr_gb *b) { return add(b, (gnode){.kind = G_EMPTY, .depth = 1}); }
lr_gnode lr_gb_never(lr_gb *b) { return add(b, (gnode){.kind = G_NEVER, .depth = 1}); }

static bool add_text(lr_gb *b, const char *s, size_t n, uint32_t *at)
{
    if (n > (1u << 26)) lr_gb_fail(b, LR_ELIMIT, "a literal is too long");
    if (!lr_gb__grow(b, (void **)&b->text, &b->cap_text, b->n_text, (uint32_t)n + 1, 1)) return false;
    *at = b->n_text;
    if (n) memcpy(b->text + b->n_text, s, n);
    b->n_text += (uint32_t)n;
    return true;
}

lr_gnode lr_gb_lit(lr_gb *b, const char *s, size_t n)
{
    uint32_t at;
    if (n == 0) return lr_gb_empty(b);
    if (!add_text(b, s, n, &at)) return 0;
    return add(b, (gnode){.kind = G_LIT, .depth = 1, .a = at, .b = (uint32_t)n});
}

uint32_t lr_gb__set(lr_gb *b, const gset *s)
{
    uint64_t h =
        (s->w[0] ^ s->w[1] * 0x9E3779B97F4A7C15u ^ s->w[2] * 0xC2B2AE3D27D4EB4Fu ^ s->w[3] * 0x165667B19E3779F9u);
    h *= 0x9E3779B97F4A7C15u;
    uint32_t at = (uint32_t)(h >> 40) % (2 * LR_G_MAX_SETS);
    for (; b->set_slot[at]; at = (at + 1) % (2 * LR_G_MAX_SETS)) {
        if (memcmp(&b->set[b->set_slot[at] - 1], s, sizeof *s) == 0) return b->set_slot[at] - 1u;
    }
    if (b->n_set >= LR_G_MAX_SETS) lr_gb_fail(b, LR_ELIMIT, "too many different character classes");
    if (!lr_gb__grow(b, (void **)&b->set, &b->cap_set, b->n_set, 1, sizeof *s)) return 0;
    b->set[b->n_set] = *s;
    b->set_slot[at] = (uint16_t)(b->n_set + 1);
    return b->n_set++;
}

lr_gnode lr_gb_bytes(lr_gb *b, const uint64_t set[4])
{
    gset s = {{set[0], set[1], set[2], set[3]}};
    if (!(s.w[0] | s.w[1] | s.w[2] | s.w[3])) return lr_gb_never(b);
    uint32_t i = lr_gb__set(b, &s);
    return add(b, (gnode){.kind = G_BYTES, .depth = 1, .a = i});
}

static lr_gnode add_list(lr_gb *b, gkind kind, const lr_gnode *nodes, size_t n)
{
    if (!check_nodes(b, nodes, n)) return 0;
    if (n == 1) return nodes[0];
    if (n > LR_G_MAX_NODES) lr_gb_fail(b, LR_ELIMIT, "the grammar is too large");
    if (!lr_gb__grow(b, (void **)&b->list, &b->cap_list, b->n_list, (uint32_t)n, sizeof *b->list)) return 0;
    uint16_t depth = 0;
    for (size_t i = 0; i < n; i++) {
        b->list[b->n_list + i] = nodes[i];
        if (depth_of(b, nodes[i]) > depth) depth = depth_of(b, nodes[i]);
    }
    uint32_t at = b->n_list;
    b->n_list += (uint32_t)n;
    return add(b, (gnode){.kind = (uint8_t)kind, .depth = (uint16_t)(depth + 1), .a = at, .b = (uint32_t)n});
}

lr_gnode lr_gb_seq(lr_gb *b, const lr_gnode *nodes, size_t n)
{
    return n ? add_list(b, G_SEQ, nodes, n) : lr_gb_empty(b);
}

lr_gnode lr_gb_alt(lr_gb *b, const lr_gnode *nodes, size_t n)
{
    return n ? add_list(b, G_ALT, nodes, n) : lr_gb_never(b);
}

lr_gnode lr_gb_rep(lr_gb *b, lr_gnode node, int32_t min, int32_t max)
{
    if (!check_nodes(b, &node, 1)) return 0;
    if (min < 0 || max < LR_REP_INF || (max != LR_REP_INF && max < min))
        lr_gb_fail(b, LR_EINVAL, "the bounds of a repetition are wrong");
    if (min > LR_G_MAX_COUNT || max > LR_G_MAX_COUNT)
        lr_gb_fail(b, LR_ELIMIT, "the bound of a repetition is over 1048576");
    if (max == 0) return lr_gb_empty(b);
    if (min == 1 && max == 1) return node;
    uint16_t depth = (uint16_t)(depth_of(b, node) + 1);
    return add(b, (gnode){.kind = G_REP, .depth = depth, .a = node, .min = min, .max = max});
}

lr_gnode lr_gb_lits(lr_gb *b, const lr_str *strings, size_t n)
{
    if (n == 0) return lr_gb_never(b);
    if (n > LR_G_MAX_NODES) lr_gb_fail(b, LR_ELIMIT, "too many strings");
    if (b->err.code || !lr_gb__grow(b, (void **)&b->lits, &b->cap_lits, b->n_lits, 2 * (uint32_t)n, sizeof *b->lits)) {
        return 0;
    }
    uint32_t at = b->n_lits;
    for (size_t i = 0; i < n; i++) {
        if (!add_text(b, strings[i].s, strings[i].n, &b->lits[at + 2 * i])) return 0;
        b->lits[at + 2 * i + 1] = (uint32_t)strings[i].n;
    }
    b->n_lits += 2 * (uint32_t)n;
    return add(b, (gnode){.kind = G_LITS, .depth = 1, .a = at, .b = (uint32_t)n});
}

lr_gnode lr_gb_graph(lr_gb *b, uint32_t n_places, const lr_gedge *edges, size_t n)
{
    if (n_places < 1 || n_places > LR_G_MAX_NODES || n > LR_G_MAX_NODES)
        lr_gb_fail(b, LR_ELIMIT, "the grammar is too large");
    uint16_t depth = 0;
    for (size_t i = 0; i < n && !b->err.code; i++) {
        if (edges[i].from >= n_places || edges[i].to >= n_places) lr_gb_fail(b, LR_EINVAL, "an edge leads nowhere");
        if (!check_nodes(b, &edges[i].node, 1)) return 0;
        if (depth_of(b, edges[i].node) > depth) depth = depth_of(b, edges[i].node);
    }
    if (b->err.code) return 0;
    uint32_t need = 2 + 3 * (uint32_t)n;
    if (!lr_gb__grow(b, (void **)&b->list, &b->cap_list, b->n_list, need, sizeof *b->list)) return 0;
    uint32_t at = b->n_list, *p = b->list + at;
    *p++ = n_places;
    *p++ = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        *p++ = edges[i].from;
        *p++ = edges[i].to;
        *p++ = edges[i].node;
    }
    b->n_list += need;
    return add(b, (gnode){.kind = G_GRAPH, .depth = (uint16_t)(depth + 1), .a = at});
}

/* ---- rules ---- */

uint32_t lr_gb_rule(lr_gb *b, const char *name, size_t n)
{
    if (b->n_rule >= LR_G_MAX_RULES) lr_gb_fail(b, LR_ELIMIT, "too many rules");
    if (!lr_gb__grow(b, (void **)&b->rule, &b->cap_rule, b->n_rule, 1, sizeof *b->rule)) return 0;
    char *copy = lr_memdup(name, n < 80 ? n : 80);
    if (!copy) {
        lr_gb_fail(b, LR_ENOMEM, "no memory for the grammar");
        return 0;
    }
    b->rule[b->n_rule] = (grule){.name = copy, .hole = -1};
    return b->n_rule++;
}

void lr_gb_define(lr_gb *b, uint32_t rule, lr_gnode node)
{
    if (b->err.code) return;
    if (rule >= b->n_rule || b->rule[rule].defined) {
        lr_gb_fail(b, LR_EINVAL, "a rule is defined twice or is none of this grammar");
    } else if (check_nodes(b, &node, 1)) {
        b->rule[rule].node = node;
        b->rule[rule].defined = true;
    }
}

void lr_gb_keep(lr_gb *b, uint32_t rule)
{
    if (rule < b->n_rule) b->rule[rule].keep = true;
}

void lr_gb_unique(lr_gb *b, uint32_t rule)
{
    if (rule < b->n_rule) b->rule[rule].keep = b->rule[rule].unique = true;
}

void lr_gb_mark(lr_gb *b, const char *s, size_t n)
{
    if (b->mark || n == 0) return;
    b->mark = lr_memdup(s, n);
    b->n_mark = b->mark ? n : 0;
    if (!b->mark) lr_gb_fail(b, LR_ENOMEM, "no memory for the grammar");
}

lr_gnode lr_gb_ref(lr_gb *b, uint32_t rule)
{
    if (rule >= b->n_rule) lr_gb_fail(b, LR_EINVAL, "a rule that is none of this grammar");
    return add(b, (gnode){.kind = G_REF, .depth = 1, .a = rule});
}

lr_gnode lr_gb_hole(lr_gb *b, int id, const char *name, size_t n)
{
    uint32_t r = lr_gb_rule(b, name, n);
    if (b->err.code) return 0;
    b->rule[r].hole = (int)b->n_hole++;
    b->rule[r].hole_id = id;
    b->rule[r].defined = b->rule[r].keep = true;
    return lr_gb_ref(b, r);
}
