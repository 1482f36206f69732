/* vocab.c - builds the tables of a vocabulary from a model file's arrays, and answers what is asked about a token.
 *
 * Everything in the arrays comes from a file: lengths, ids and texts are checked here, once, and never again.
 */
#include "text/text_int.h"
#include "text/unicode.h"

/* ---- hashing of raw text ---- */

uint32_t lr_text_hash(const char *s, size_t n)
{
    uint64_t h = n * 0x9E3779B97F4A7C15u, w;
    for (; n >= 8; s += 8, n -= 8) {
        memcpy(&w, s, 8);
        h = (h ^ w) * 0xFF51AFD7ED558CCDu;
        h ^= h >> 32;
    }
    w = 0;
    for (size_t i = 0; i < n; i++) w |= (uint64_t)(uint8_t)s[i] << (8 * i);
    h = (h ^ w) * 0xFF51AFD7ED558CCDu;
    h ^= h >> 32;
    h *= 0xC4CEB9FE1A85EC53u;
    return (uint32_t)(h >> 32);
}

int32_t lr_vocab_raw_id(const lr_vocab *v, const char *s, size_t n)
{
    if (n > v->max_raw) return -1;
    uint32_t h = lr_text_hash(s, n);
    for (uint32_t i = h & v->slot_mask; v->slot[i].id1; i = (i + 1) & v->slot_mask) {
        uint32_t id = v->slot[i].id1 - 1;
        if (v->slot[i].hash == h && lr_str_eq(lr_vocab_raw_str(v, id), (lr_str){s, n})) return (int32_t)id;
    }
    return -1;
}

static void slot_add(lr_vocab *v, uint32_t id)
{
    lr_str t = lr_vocab_raw_str(v, id);
    uint32_t h = lr_text_hash(t.s, t.n), i = h & v->slot_mask;
    for (; v->slot[i].id1; i = (i + 1) & v->slot_mask)
        if (v->slot[i].hash == h && lr_str_eq(lr_vocab_raw_str(v, v->slot[i].id1 - 1), t)) return;
    v->slot[i].hash = h;
    v->slot[i].id1 = id + 1;
}

/* ---- the byte-level alphabet of GPT-2: bytes that print stand for themselves as characters, the others, in order, for
 * U+0100 and up ---- */

static bool prints(unsigned b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; }

static int32_t alphabet_char(uint8_t b)
{
    if (prints(b)) return b;
    return 256 + (b < 33 ? b : b < 161 ? b - 127 + 33 : 67);
}

size_t lr_text_bytelevel(uint8_t b, char *out) { return lr_utf8_put(alphabet_char(b), (uint8_t *)out); }

/* The byte of a character of the alphabet, -1 if it is not one. */
static int alphabet_byte(int32_t cp)
{
    if (cp < 0 || cp > 256 + 67) return -1;
    if (cp < 256) return prints((unsigned)cp) ? cp : -1;
    cp -= 256;
    return cp < 33 ? cp : cp < 67 ? cp - 33 + 127 : 173;
}

/* ---- pieces ---- */

static size_t bpe_piece(lr_str raw, char *out)
{
    size_t o = 0;
    for (size_t i = 0; i < raw.n;) {
        int32_t cp;
        i += lr_utf8_get((const uint8_t *)raw.s + i, raw.n - i, &cp);
        int b = alphabet_byte(cp);
        if (b < 0) { /* not spelt in the alphabet: stands for itself */
            memcpy(out, raw.s, raw.n);
            return raw.n;
        }
        out[o++] = (char)b;
    }
    return o;
}

static int hex(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* "<0x0A>" -> 10; -1 if it is not spelt so. */
static int byte_name(lr_str raw)
{
    if (raw.n != 6 || memcmp(raw.s, "<0x", 3) != 0 || raw.s[5] != '>') return -1;
    int a = hex(raw.s[3]), b = hex(raw.s[4]);
    return a < 0 || b < 0 ? -1 : a * 16 + b;
}

static size_t spm_piece(lr_str raw, char *out)
{
    size_t o = 0;
    for (size_t i = 0; i < raw.n;) {
        if (i + 3 <= raw.n && memcmp(raw.s + i, "\xE2\x96\x81", 3) == 0) {
            out[o++] = ' ';
            i += 3;
        } else {
            out[o++] = raw.s[i++];
        }
    }
    return o;
}

static size_t make_piece(const lr_vocab *v, uint32_t id, char *out)
{
    lr_str raw = lr_vocab_raw_str(v, id);
    int type = v->type[id];
    if (type == LR_TT_BYTE && byte_name(raw) >= 0) {
        out[0] = (char)byte_name(raw);
        return 1;
    }
    if (v->kind != LR_VOCAB_BPE && type != LR_TT_CONTROL && type != LR_TT_UNKNOWN) return spm_piece(raw, out);
    if (v->kind == LR_VOCAB_BPE && type == LR_TT_NORMAL) return bpe_piece(raw, out);
    if (raw.n) memcpy(out, raw.s, raw.n);
    return raw.n;
}

/* ---- what kind of token ---- */

static bool name_in(lr_str t, const char *const *list)
{
    for (; *list; list++)
        if (lr_str_is(t, *list)) return true;
    return false;
}

static bool has_token(const lr_vocab *v, const char *name) { return lr_vocab_raw_id(v, name, strlen(name)) >= 0; }

/* Names that end a turn or a text in the chat formats in use. "</s>" is not among them: it is an HTML tag in some
 * vocabularies, and where it ends texts the file says so. */
static bool ends_generation(const lr_vocab *v, lr_str t)
{
    static const char *const names[] = {"<|im_end|>",
                                        "<|endoftext|>",
                                        "<|eot_id|>",
                                        "<|eom_id|>",
                                        "<|end_of_text|>",
                                        "<end_of_turn>",
                                        "<turn|>",
                                        "<|end|>",
                                        "<|return|>",
                                        "<|call|>",
                                        "<|flush|>",
                                        "<|calls|>",
                                        "<|eot|>",
                                        "<|eom|>",
                                        "<|endofturn|>",
                                        "<end_of_utterance>",
                                        "<EOT>",
                                        "_<EOT>",
                                        "[EOT]",
                                        "[EOS]",
                                        "<eos>",
                                        "<|eos|>",
                                        "<|END_OF_TURN_TOKEN|>",
                                        "<|end_of_turn|>",
                                        "<｜end▁of▁sentence｜>",
                                        NULL};
    if (!name_in(t, names)) return false;
    /* In the harmony format <|end|> ends a message; <|return|> and <|call|> end the turn. */
    if (lr_str_is(t, "<|end|>") && has_token(v, "<|return|>") && has_token(v, "<|call|>")) return false;
    return true;
}

static bool has_prefix(lr_str t, const char *z) { return t.n >= strlen(z) && memcmp(t.s, z, strlen(z)) == 0; }

/* Whether a user-defined token is a name of chat machinery, which plain text must not reach. */
static bool is_machinery(const lr_vocab *v, lr_str t)
{
    if (t.n < 3 || memchr(t.s, ' ', t.n)) return false;
    char a = t.s[0], z = t.s[t.n - 1];
    if (has_prefix(t, "<|") && t.n > 4 && t.s[t.n - 2] == '|' && z == '>') return true;
    if (has_prefix(t, "<start_of_") || has_prefix(t, "<end_of_")) return true;
    return v->kind == LR_VOCAB_BPE && ((a == '<' && z == '>') || (a == '[' && z == ']'));
}

static void set_flags(lr_vocab *v)
{
    for (uint32_t id = 0; id < v->n; id++) {
        int type = v->type[id];
        bool named = type == LR_TT_CONTROL || type == LR_TT_USER || type == LR_TT_UNKNOWN;
        lr_str t = lr_vocab_raw_str(v, id);
        unsigned f = 0;
        if (type == LR_TT_CONTROL || type == LR_TT_UNKNOWN) f |= LR_TF_CONTROL;
        if ((int32_t)id == v->eos || (int32_t)id == v->eot || (named && ends_generation(v, t))) f |= LR_TF_EOG;
        if (named && t.n) f |= LR_TF_NAME;
        if (type == LR_TT_USER && t.n && !(f & LR_TF_EOG) && !is_machinery(v, t)) f |= LR_TF_PLAIN;
        if (type == LR_TT_NORMAL || type == LR_TT_USER) f |= LR_TF_MERGE;
        v->flag[id] = (uint8_t)f;
    }
}

/* ---- names ---- */

/* Names are looked for in the text as it is, so by their pieces. */
typedef struct name {
    lr_str s;
    int32_t id;
} name;

static int by_text(const void *pa, const void *pb)
{
    const name *a = pa, *b = pb;
    int c = memcmp(a->s.s, b->s.s, a->s.n < b->s.n ? a->s.n : b->s.n);
    if (c) return c;
    if (a->s.n != b->s.n) return a->s.n < b->s.n ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static int names_build(lr_vocab *v, lr_vocab_names *names, unsigned flag, lr_error *err)
{
    uint32_t n = 0;
    for (uint32_t id = 0; id < v->n; id++) n += (v->flag[id] & flag) != 0 && v->piece_at[id + 1] > v->piece_at[id];
    name *list = lr_reallocarray(NULL, (size_t)n + 1, sizeof *list);
    names->id = lr_reallocarray(NULL, (size_t)n + 1, sizeof *names->id);
    if (!names->id || !list) {
        lr_free(list);
        return lr_fail(err, LR_ENOMEM, "no memory for the names of %u tokens", n);
    }
    n = 0;
    for (uint32_t id = 0; id < v->n; id++)
        if (v->flag[id] & flag && v->piece_at[id + 1] > v->piece_at[id])
            list[n++] = (name){lr_vocab_piece_str(v, id), (int32_t)id};
    qsort(list, n, sizeof *list, by_text);
    for (uint32_t i = 0; i < n; i++) names->id[i] = list[i].id;
    lr_free(list);
    names->n = n;
    uint32_t k = 0;
    for (unsigned b = 0; b < 256; b++) {
        names->first[b] = k;
        while (k < n && (uint8_t)lr_vocab_piece_str(v, (uint32_t)names->id[k]).s[0] == b) k++;
    }
    names->first[256] = n;
    return 0;
}

int32_t lr_vocab_names_match(const lr_vocab *v, const lr_vocab_names *names, const uint8_t *s, size_t i, size_t n)
{
    uint32_t lo = names->first[s[i]], hi = names->first[s[i] + 1];
    int32_t found = -1;
    for (size_t d = 1; lo < hi; d++) { /* [lo, hi): the names that begin with the d bytes seen so far */
        for (; lo < hi && lr_vocab_piece_str(v, (uint32_t)names->id[lo]).n == d; lo++)
            if (found < 0 || lr_vocab_piece_str(v, (uint32_t)found).n < d) found = names->id[lo];
        if (i + d >= n) break;
        uint8_t c = s[i + d];
        uint32_t a = lo, b = hi;
        while (a < b) {
            uint32_t m = a + (b - a) / 2;
            if ((uint8_t)lr_vocab_piece_str(v, (uint32_t)names->id[m]).s[d] < c)
                a = m + 1;
            else
                b = m;
        }
        lo = a;
        b = hi;
        while (a < b) {
            uint32_t m = a + (b - a) / 2;
            if ((uint8_t)lr_vocab_piece_str(v, (uint32_t)names->id[m]).s[d] <= c)
                a = m + 1;
            else
                b = m;
        }
        hi = a;
    }
    return found;
}

/* ---- merges and scores ---- */

static void pair_add(lr_vocab *v, int32_t a, int32_t b, uint32_t rank, int32_t id)
{
    uint64_t key = ((uint64_t)(uint32_t)a << 32 | (uint32_t)b) + 1;
    uint64_t i = (key * 0x9E3779B97F4A7C15u) >> 32 & v->pair_mask;
    for (; v->pair[i].key; i = (i + 1) & v->pair_mask)
        if (v->pair[i].key == key) return; /* the better one came first */
    v->pair[i] = (lr_pair){key, rank, id};
}

static int add_merges(lr_vocab *v, const lr_vocab_spec *spec, lr_error *err)
{
    size_t size = 64;
    char both[2 * LR_TOKEN_MAX];
    if (spec->n_merges > LR_VOCAB_MAX) return lr_fail(err, LR_EFORMAT, "tokenizer: %zu merges", spec->n_merges);
    while (size < spec->n_merges + spec->n_merges / 2) size *= 2;
    v->pair_mask = size - 1;
    v->pair = lr_calloc(size, sizeof *v->pair);
    if (!v->pair) return lr_fail(err, LR_ENOMEM, "no memory for %zu merges", spec->n_merges);
    for (size_t i = 0; i < spec->n_merges; i++) {
        lr_str m = spec->merges[i];
        const char *space = m.n > 2 ? memchr(m.s + 1, 0, m.n - 2) : NULL;
        if (!space && m.n > 2) space = memchr(m.s + 1, ' ', m.n - 2);
        if (!space || m.n > sizeof both) return lr_fail(err, LR_EFORMAT, "tokenizer: merge %zu is not two tokens", i);
        size_t na = (size_t)(space - m.s), nb = m.n - na - 1;
        memcpy(both, m.s, na);
        memcpy(both + na, space + 1, nb);
        int32_t a = lr_vocab_raw_id(v, m.s, na), b = lr_vocab_raw_id(v, space + 1, nb);
        int32_t c = lr_vocab_raw_id(v, both, na + nb);
        if (a < 0 || b < 0 || c < 0)
            return lr_fail(err, LR_EFORMAT, "tokenizer: merge %zu, \"%.*s\", is of tokens that do not exist", i,
                           (int)(m.n < 60 ? m.n : 60), m.s);
        pair_add(v, a, b, (uint32_t)i, c);
    }
    return 0;
}

/* Which characters stand side by side in pieces: no merge crosses any other neighbours. */
static void mark_near(lr_vocab *v, uint32_t id)
{
    lr_str t = lr_vocab_raw_str(v, id);
    int32_t prev = -1, cp;
    for (size_t i = 0; i < t.n; prev = cp) {
        i += lr_utf8_get((const uint8_t *)t.s + i, t.n - i, &cp);
        if (i == t.n && prev < 0) break;
        uint32_t h = lr_near_hash(prev, cp);
        if (prev >= 0) v->near[h >> 3] |= (uint8_t)(1u << (h & 7));
    }
}

/* A float's order as an unsigned number, turned round; -0 is 0, and what is no number comes last. */
static uint32_t score_rank(float f)
{
    union {
        float f;
        uint32_t u;
    } x = {f + 0.0f};
    if (f != f) return UINT32_MAX - 1;
    uint32_t up = x.u & 0x80000000u ? ~x.u : x.u | 0x80000000u;
    return ~up < UINT32_MAX - 1 ? ~up : UINT32_MAX - 1;
}

static int add_scores(lr_vocab *v, const lr_vocab_spec *spec, lr_error *err)
{
    v->rank = lr_reallocarray(NULL, v->n, sizeof *v->rank);
    v->near = lr_calloc((size_t)1 << (LR_NEAR_BITS - 3), 1);
    if (!v->rank || !v->near) return lr_fail(err, LR_ENOMEM, "no memory for the scores of %u tokens", v->n);
    for (uint32_t id = 0; id < v->n; id++) {
        v->rank[id] = spec->scores ? score_rank(spec->scores[id]) : 0;
        if (v->flag[id] & LR_TF_MERGE) mark_near(v, id);
    }
    return 0;
}

static void find_bytes(lr_vocab *v)
{
    for (unsigned b = 0; b < 256; b++) {
        char c[2];
        v->byte_id[b] = v->kind == LR_VOCAB_BPE ? lr_vocab_raw_id(v, c, lr_text_bytelevel((uint8_t)b, c)) : -1;
    }
    for (uint32_t id = 0; v->kind != LR_VOCAB_BPE && id < v->n; id++) {
        int b = v->type[id] == LR_TT_BYTE ? byte_name(lr_vocab_raw_str(v, id)) : -1;
        if (b >= 0 && v->byte_id[b] < 0) v->byte_id[b] = (int32_t)id;
    }
}

/* ---- building ---- */

static int check_spec(lr_vocab *v, const lr_vocab_spec *spec, lr_error *err)
{
    const struct {
        const char *name;
        int32_t id;
    } ids[] = {
        {"bos", spec->bos}, {"eos", spec->eos}, {"unknown", spec->unk}, {"eot", spec->eot}, {"padding", spec->pad}};
    const char *model = spec->model ? spec->model : "";
    if (strcmp(model, "gpt2") == 0)
        v->kind = LR_VOCAB_BPE;
    else if (strcmp(model, "llama") == 0)
        v->kind = LR_VOCAB_SPM;
    else if (spec->n_steps && strcmp(model, "chars") == 0)
        v->kind = LR_VOCAB_CHARS;
    else if (spec->n_steps && spec->logs && strcmp(model, "unigram") == 0)
        v->kind = LR_VOCAB_UNIGRAM;
    else
        return lr_fail(err, LR_EUNSUPPORTED, "tokenizer.ggml.model \"%.40s\" is not supported (gpt2 and llama are)",
                       model);
    v->pre = v->kind == LR_VOCAB_BPE && !spec->n_steps ? lr_pre_find(spec->pre) : NULL;
    if (v->kind == LR_VOCAB_BPE && !spec->pre && !spec->n_steps)
        return lr_fail(err, LR_EUNSUPPORTED, "the file does not say how text is split (tokenizer.ggml.pre is missing)");
    if (v->kind == LR_VOCAB_BPE && !v->pre && !spec->n_steps)
        return lr_fail(err, LR_EUNSUPPORTED, "tokenizer.ggml.pre \"%.40s\" is not known", spec->pre);
    if (spec->n_tokens < 1 || spec->n_tokens > LR_VOCAB_MAX)
        return lr_fail(err, LR_EFORMAT, "tokenizer: %u tokens", spec->n_tokens);
    if (v->kind == LR_VOCAB_SPM && !spec->scores) return lr_fail(err, LR_EFORMAT, "tokenizer: tokens without scores");
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (ids[i].id < -1 || ids[i].id >= (int32_t)spec->n_tokens)
            return lr_fail(err, LR_EFORMAT, "tokenizer: the %s token is %d, of %u tokens", ids[i].name, ids[i].id,
                           spec->n_tokens);
    for (size_t i = 0; i < spec->n_eogs; i++)
        if (spec->eogs[i] < 0 || spec->eogs[i] >= (int32_t)spec->n_tokens)
            return lr_fail(err, LR_EFORMAT, "tokenizer: token %d ends texts, of %u tokens", spec->eogs[i],
                           spec->n_tokens);
    for (size_t i = 0; i < spec->n_edges; i++)
        if (spec->edges[2 * i] < 0 || spec->edges[2 * i] >= (int32_t)spec->n_tokens)
            return lr_fail(err, LR_EFORMAT, "tokenizer: token %d, of %u tokens", spec->edges[2 * i], spec->n_tokens);
    v->nfc = v->pre && (spec->nfc ? spec->nfc > 0 : v->pre->nfc);
    v->whole = spec->whole ? spec->whole > 0 : v->pre && v->pre->whole;
    v->fuse_unk = spec->fuse_unk;
    v->prefix_once = spec->prefix_once;
    v->n = spec->n_tokens;
    v->bos = spec->bos, v->eos = spec->eos, v->unk = spec->unk, v->eot = spec->eot, v->pad = spec->pad;
    v->add_bos = spec->add_bos, v->add_eos = spec->add_eos;
    v->add_space_prefix = v->kind != LR_VOCAB_BPE && spec->add_space_prefix;
    return 0;
}

/* Copies the raw texts and makes the pieces, which are never longer. */
static int add_texts(lr_vocab *v, const lr_vocab_spec *spec, lr_error *err)
{
    size_t total = 0, slots = 64;
    for (uint32_t id = 0; id < v->n; id++) {
        if (spec->tokens[id].n > LR_TOKEN_MAX)
            return lr_fail(err, LR_EFORMAT, "tokenizer: token %u is %zu bytes long", id, spec->tokens[id].n);
        total += spec->tokens[id].n;
    }
    if (total > UINT32_MAX / 2) return lr_fail(err, LR_EFORMAT, "tokenizer: %zu bytes of tokens", total);
    while (slots < (size_t)v->n + v->n / 2) slots *= 2;
    v->slot_mask = (uint32_t)slots - 1;
    v->raw_text = lr_malloc(total + 1);
    v->piece_text = lr_malloc(total + 1);
    v->raw_at = lr_reallocarray(NULL, (size_t)v->n + 1, sizeof *v->raw_at);
    v->piece_at = lr_reallocarray(NULL, (size_t)v->n + 1, sizeof *v->piece_at);
    v->type = lr_malloc(v->n);
    v->flag = lr_calloc(v->n, 1);
    v->slot = lr_calloc(slots, sizeof *v->slot);
    if (!v->raw_text || !v->piece_text || !v->raw_at || !v->piece_at || !v->type || !v->flag || !v->slot)
        return lr_fail(err, LR_ENOMEM, "no memory for %u tokens", v->n);
    uint32_t o = 0, po = 0;
    for (uint32_t id = 0; id < v->n; id++) {
        lr_str t = spec->tokens[id];
        int type = spec->types ? spec->types[id] : LR_TT_NORMAL;
        if (!spec->types && v->kind == LR_VOCAB_SPM && byte_name(t) >= 0) type = LR_TT_BYTE;
        v->type[id] = type >= LR_TT_NORMAL && type <= LR_TT_BYTE ? (uint8_t)type : LR_TT_NORMAL;
        if (t.n) memcpy(v->raw_text + o, t.s, t.n);
        v->raw_at[id] = o;
        v->raw_at[id + 1] = o += (uint32_t)t.n;
        v->piece_at[id] = po;
        v->piece_at[id + 1] = po += (uint32_t)make_piece(v, id, v->piece_text + po);
        if (t.n > v->max_raw) v->max_raw = t.n;
        if (po - v->piece_at[id] > v->max_piece) v->max_piece = po - v->piece_at[id];
        if (t.n) slot_add(v, id);
    }
    return 0;
}

int lr_vocab_new(lr_vocab **out, const lr_vocab_spec *spec, lr_error *err)
{
    lr_vocab *v = lr_calloc(1, sizeof *v);
    if (!v) return lr_fail(err, LR_ENOMEM, "no memory for a vocabulary");
    atomic_init(&v->refs, 1);
    if (check_spec(v, spec, err) || add_texts(v, spec, err)) goto fail;
    set_flags(v);
    for (size_t i = 0; i < spec->n_eogs; i++) v->flag[spec->eogs[i]] |= LR_TF_EOG;
    if (spec->n_edges && !(v->edge = lr_calloc(v->n, 1))) {
        lr_fail(err, LR_ENOMEM, "no memory for %u tokens", v->n);
        goto fail;
    }
    for (size_t i = 0; i < spec->n_edges; i++) v->edge[spec->edges[2 * i]] = (uint8_t)spec->edges[2 * i + 1];
    find_bytes(v);
    if (spec->n_steps && lr_pipe_new(&v->pipe, spec->steps, spec->n_steps, err)) goto fail;
    if ((v->kind == LR_VOCAB_BPE || v->kind == LR_VOCAB_CHARS) && add_merges(v, spec, err)) goto fail;
    if ((v->kind == LR_VOCAB_SPM || v->kind == LR_VOCAB_CHARS) && add_scores(v, spec, err)) goto fail;
    if (v->kind == LR_VOCAB_UNIGRAM && lr_unigram_init(v, spec->logs, err)) goto fail;
    if (names_build(v, &v->special, LR_TF_NAME, err) || names_build(v, &v->plain, LR_TF_PLAIN, err)) goto fail;
    *out = v;
    return 0;
fail:
    lr_vocab_unref(v);
    return err->code;
}

lr_vocab *lr_vocab_ref(lr_vocab *v)
{
    if (v) atomic_fetch_add(&v->refs, 1);
    return v;
}

void lr_vocab_unref(lr_vocab *v)
{
    if (!v || atomic_fetch_sub(&v->refs, 1) != 1) return;
    lr_pipe_free(v->pipe);
    void *parts[] = {
        v->uni.id, v->uni.score, v->raw_text, v->piece_text, v->raw_at, v->piece_at,   v->type,     v->flag,
        v->rank,   v->slot,      v->edge,     v->pair,       v->near,   v->special.id, v->plain.id, v};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) lr_free(parts[i]);
}

/* ---- questions ---- */

bool lr_text_pre_known(const char *pre) { return lr_pre_find(pre) != NULL; }

bool lr_text_default_bos(const char *model, const char *pre)
{
    const lr_pre *p = pre ? lr_pre_find(pre) : NULL;
    return (model && strcmp(model, "llama") == 0) || (model && strcmp(model, "gpt2") == 0 && p && p->bos);
}

static bool in_range(const lr_vocab *v, int32_t id) { return id >= 0 && (uint32_t)id < v->n; }

uint32_t lr_vocab_size(const lr_vocab *v) { return v->n; }
int32_t lr_vocab_bos(const lr_vocab *v) { return v->bos; }
int32_t lr_vocab_eos(const lr_vocab *v) { return v->eos; }
int32_t lr_vocab_eot(const lr_vocab *v) { return v->eot; }
int32_t lr_vocab_unk(const lr_vocab *v) { return v->unk; }
int32_t lr_vocab_pad(const lr_vocab *v) { return v->pad; }
bool lr_vocab_add_bos(const lr_vocab *v) { return v->add_bos; }
bool lr_vocab_add_eos(const lr_vocab *v) { return v->add_eos; }
size_t lr_vocab_max_piece(const lr_vocab *v) { return v->max_piece; }
int lr_vocab_type(const lr_vocab *v, int32_t id) { return in_range(v, id) ? v->type[id] : LR_TT_NORMAL; }
bool lr_vocab_is_control(const lr_vocab *v, int32_t id) { return in_range(v, id) && v->flag[id] & LR_TF_CONTROL; }
bool lr_vocab_is_eog(const lr_vocab *v, int32_t id) { return in_range(v, id) && v->flag[id] & LR_TF_EOG; }

const char *lr_vocab_piece(const lr_vocab *v, int32_t id, size_t *n)
{
    lr_str t = in_range(v, id) ? lr_vocab_piece_str(v, (uint32_t)id) : (lr_str){"", 0};
    *n = t.n;
    return t.s;
}

const char *lr_vocab_raw(const lr_vocab *v, int32_t id, size_t *n)
{
    lr_str t = in_range(v, id) ? lr_vocab_raw_str(v, (uint32_t)id) : (lr_str){"", 0};
    *n = t.n;
    return t.s;
}

int32_t lr_vocab_find(const lr_vocab *v, const char *text, size_t n)
{
    char raw[4 * LR_TOKEN_MAX];
    size_t o = 0;
    if (n == 0 || n > LR_TOKEN_MAX) return -1;
    int32_t id = lr_vocab_raw_id(v, text, n);
    if (id >= 0) return id;
    for (size_t i = 0; i < n; i++) {
        if (v->kind == LR_VOCAB_BPE) {
            o += lr_text_bytelevel((uint8_t)text[i], raw + o);
        } else if (text[i] == ' ') {
            o += lr_utf8_put(0x2581, (uint8_t *)raw + o);
        } else {
            raw[o++] = text[i];
        }
    }
    id = lr_vocab_raw_id(v, raw, o);
    return id < 0 && n == 1 ? v->byte_id[(uint8_t)text[0]] : id;
}
