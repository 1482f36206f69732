/* grammar_oracle.h - random grammars and a slow, plain recogniser for them, to check src/grammar against.
 *
 * A grammar is a list of rules over trees. The recogniser fills, for each tree and each place in the text, the set of
 * places where a match may end and whether a match may run past the text's end; for recursion it repeats until nothing
 * changes. It shares no idea with the automata.
 */
#ifndef LR_TEST_GRAMMAR_ORACLE_H
#define LR_TEST_GRAMMAR_ORACLE_H
#include "grammar_fixture.h"

enum { O_EMPTY, O_SET, O_LIT, O_SEQ, O_ALT, O_REP, O_REF };
enum { O_MAX_NODES = 400, O_MAX_RULES = 6, O_TEXT = 24 };

typedef struct onode {
    int kind, n, kid[4], min, max, rule; /* max -1 = no bound */
    char s[8];                           /* SET: its members; LIT: the text */
    bool productive;                     /* matches some text; some text that is not empty */
    bool longer;
    uint32_t end[O_TEXT + 1]; /* by start: bits of ends */
    bool over[O_TEXT + 1];    /* by start: may need more bytes than the text has */
} onode;

typedef struct oracle {
    onode node[O_MAX_NODES];
    int n_node, rule[O_MAX_RULES], n_rule;
    uint64_t rng;
} oracle;

static inline uint32_t o_rand(oracle *o, uint32_t n)
{
    o->rng = o->rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(o->rng >> 33) % n;
}

/* A random tree over the bytes a..c. */
static inline int o_tree(oracle *o, int depth)
{
    int id = o->n_node++;
    onode *t = &o->node[id];
    memset(t, 0, sizeof *t);
    uint32_t k = o_rand(o, depth <= 0 || o->n_node > O_MAX_NODES - 60 ? 5 : 12);
    if (k == 0) {
        t->kind = O_EMPTY;
    } else if (k == 1) {
        t->kind = O_LIT;
        for (uint32_t i = 0, n = 1 + o_rand(o, 3); i < n; i++) t->s[i] = (char)('a' + o_rand(o, 3));
    } else if (k <= 3) {
        t->kind = O_SET;
        for (int c = 'a', i = 0; c <= 'c'; c++)
            if (o_rand(o, 2) || (c == 'c' && i == 0)) t->s[i++] = (char)c;
    } else if (k <= 5) {
        t->kind = O_REF;
        t->rule = (int)o_rand(o, (uint32_t)o->n_rule);
    } else if (k <= 8) {
        t->kind = O_SEQ;
        int n = 2 + (int)o_rand(o, 2);
        for (int i = 0; i < n; i++) {
            int kid = o_tree(o, depth - 1);
            o->node[id].kid[i] = kid;
        }
        o->node[id].n = n;
    } else if (k <= 10) {
        t->kind = O_ALT;
        int n = 2 + (int)o_rand(o, 2);
        for (int i = 0; i < n; i++) {
            int kid = o_tree(o, depth - 1);
            o->node[id].kid[i] = kid;
        }
        o->node[id].n = n;
    } else {
        static const int bounds[][2] = {{0, -1}, {1, -1}, {0, 1}, {2, 3}, {0, 90}, {3, 100}, {2, -1}, {70, -1}, {0, 2}};
        t->kind = O_REP;
        uint32_t b = o_rand(o, sizeof bounds / sizeof *bounds);
        t->min = bounds[b][0];
        t->max = bounds[b][1];
        int kid = o_tree(o, depth - 1);
        o->node[id].kid[0] = kid;
        o->node[id].n = 1;
    }
    return id;
}

static inline void o_make(oracle *o, uint64_t seed)
{
    o->rng = seed * 2862933555777941757u + 3037000493u;
    for (int i = 0; i < 4; i++) (void)o_rand(o, 2);
    o->n_node = 0;
    o->n_rule = 1 + (int)o_rand(o, O_MAX_RULES);
    for (int r = 0; r < o->n_rule; r++) o->rule[r] = o_tree(o, 3);
}

static inline lr_gnode o_build_node(const oracle *o, lr_gb *b, int id)
{
    const onode *t = &o->node[id];
    lr_gnode kid[4];
    for (int i = 0; i < t->n; i++) kid[i] = o_build_node(o, b, t->kid[i]);
    switch (t->kind) {
    case O_EMPTY:
        return lr_gb_empty(b);
    case O_SET:
        return b_class(b, t->s);
    case O_LIT:
        return b_lit(b, t->s);
    case O_SEQ:
        return lr_gb_seq(b, kid, (size_t)t->n);
    case O_ALT:
        return lr_gb_alt(b, kid, (size_t)t->n);
    case O_REP:
        return lr_gb_rep(b, kid[0], t->min, t->max);
    default:
        return lr_gb_ref(b, (uint32_t)t->rule);
    }
}

/* Every rule kept apart if keep is set. */
static inline int o_build(const oracle *o, bool keep, lr_grammar **g, lr_error *err)
{
    lr_gb *b;
    if (lr_gb_new(&b, err)) return err->code;
    for (int r = 0; r < o->n_rule; r++) {
        char name[16];
        snprintf(name, sizeof name, "r%d", r);
        (void)lr_gb_rule(b, name, strlen(name));
        if (keep) lr_gb_keep(b, (uint32_t)r);
    }
    for (int r = 0; r < o->n_rule; r++) lr_gb_define(b, (uint32_t)r, o_build_node(o, b, o->rule[r]));
    int rc = lr_gb_compile(b, 0, g, err);
    lr_gb_free(b);
    return rc;
}

static inline void o_print(const oracle *o, int id)
{
    const onode *t = &o->node[id];
    static const char *const open[] = {"\"\"", "[", "\"", "(", "(", "(", "r"};
    printf("%s", open[t->kind]);
    if (t->kind == O_REF) printf("%d", t->rule);
    if (t->kind == O_SET || t->kind == O_LIT) printf("%s%s", t->s, t->kind == O_SET ? "]" : "\"");
    for (int i = 0; i < t->n; i++) {
        if (i) printf(t->kind == O_ALT ? " | " : " ");
        o_print(o, t->kid[i]);
    }
    if (t->n) printf(")");
    if (t->kind == O_REP) printf("{%d,%d}", t->min, t->max);
}

static inline bool o_productive(oracle *o)
{
    for (int i = 0; i < o->n_node; i++) o->node[i].productive = o->node[i].longer = false;
    for (bool again = true; again;) {
        again = false;
        for (int i = 0; i < o->n_node; i++) {
            onode *t = &o->node[i];
            bool p = t->kind <= O_LIT, l = t->kind == O_SET || t->kind == O_LIT, any = false;
            if (t->kind == O_REF) {
                p = o->node[o->rule[t->rule]].productive;
                l = o->node[o->rule[t->rule]].longer;
            } else if (t->kind == O_SEQ) {
                p = true;
                for (int k = 0; k < t->n; k++) {
                    p = p && o->node[t->kid[k]].productive;
                    any = any || o->node[t->kid[k]].longer;
                }
                l = p && any;
            } else if (t->kind == O_ALT) {
                for (int k = 0; k < t->n; k++) {
                    p = p || o->node[t->kid[k]].productive;
                    l = l || o->node[t->kid[k]].longer;
                }
            } else if (t->kind == O_REP) {
                p = t->min == 0 || o->node[t->kid[0]].productive;
                l = o->node[t->kid[0]].longer;
            }
            again = again || p != t->productive || l != t->longer;
            t->productive = p;
            t->longer = l;
        }
    }
    return o->node[o->rule[0]].productive;
}

/* Ends of node `id` from each of the places `from`; *over as in onode. */
static inline uint32_t o_from(const oracle *o, int id, uint32_t from, int n, bool *over)
{
    uint32_t ends = 0;
    for (int i = 0; i <= n; i++) {
        if (!(from >> i & 1)) continue;
        ends |= o->node[id].end[i];
        *over = *over || o->node[id].over[i];
    }
    return ends;
}

static inline void o_eval(oracle *o, onode *t, int i, const char *s, int n)
{
    uint32_t ends = 0;
    bool over = false;
    int len = (int)strlen(t->s);
    switch (t->kind) {
    case O_EMPTY:
        ends = 1u << i;
        break;
    case O_SET:
        if (i == n)
            over = true;
        else if (strchr(t->s, s[i]))
            ends = 1u << (i + 1);
        break;
    case O_LIT:
        if (n - i >= len)
            ends = memcmp(s + i, t->s, (size_t)len) == 0 ? 1u << (i + len) : 0;
        else
            over = memcmp(s + i, t->s, (size_t)(n - i)) == 0;
        break;
    case O_REF:
        ends = o->node[o->rule[t->rule]].end[i];
        over = o->node[o->rule[t->rule]].over[i];
        break;
    case O_SEQ: {
        uint32_t at = 1u << i;
        bool rest[5] = {true, true, true, true, true};
        for (int k = t->n - 1; k >= 0; k--) rest[k] = rest[k + 1] && o->node[t->kid[k]].productive;
        for (int k = 0; k < t->n; k++) {
            bool v = false;
            at = o_from(o, t->kid[k], at, n, &v);
            over = over || (v && rest[k + 1]);
        }
        ends = at;
        break;
    }
    case O_ALT:
        for (int k = 0; k < t->n; k++) {
            ends |= o->node[t->kid[k]].end[i];
            over = over || o->node[t->kid[k]].over[i];
        }
        break;
    case O_REP: {
        /* rounds: places after exactly r repetitions; over if some repetition runs over, and enough can follow */
        uint32_t at = 1u << i;
        int most = t->max < 0 ? t->min + n + 2 : t->max;
        for (int r = 0;; r++) {
            if (r >= t->min) ends |= at;
            if (r == most || !at) break;
            at = o_from(o, t->kid[0], at, n, &over);
        }
        break;
    }
    }
    t->end[i] = ends;
    t->over[i] = over;
}

/* What the grammar says of a text: bit 0: it is complete; bit 1: more bytes may follow. */
static inline int o_judge(oracle *o, const char *s, int n)
{
    for (int k = 0; k < o->n_node; k++) {
        memset(o->node[k].end, 0, sizeof o->node[k].end);
        memset(o->node[k].over, 0, sizeof o->node[k].over);
    }
    for (bool again = true; again;) {
        again = false;
        for (int k = o->n_node - 1; k >= 0; k--) {
            onode *t = &o->node[k];
            if (!t->productive) continue;
            for (int i = n; i >= 0; i--) {
                uint32_t ends = t->end[i];
                bool over = t->over[i];
                o_eval(o, t, i, s, n);
                again = again || ends != t->end[i] || over != t->over[i];
            }
        }
    }
    const onode *root = &o->node[o->rule[0]];
    return (root->end[0] >> n & 1) | (root->over[0] ? 2 : 0);
}

#endif
