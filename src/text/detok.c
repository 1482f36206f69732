/* detok.c - ids to text: all at once as raw bytes, or streamed as valid UTF-8.
 */
#include "text/text_int.h"
#include "text/unicode.h"
#include <assert.h>

/* What a token shows, given whether the space before the text is still to be taken away; updates that. */
static lr_str shown(const lr_vocab *v, int32_t id, bool special, bool *strip)
{
    lr_str p = {"", 0};
    if (id < 0 || (uint32_t)id >= v->n) return p;
    if (v->flag[id] & LR_TF_CONTROL) {
        if (!v->prefix_once) *strip = v->add_space_prefix;
        return special ? lr_vocab_piece_str(v, (uint32_t)id) : p;
    }
    p = lr_vocab_piece_str(v, (uint32_t)id);
    if (p.n && *strip) {
        *strip = false;
        if (p.s[0] == ' ') p = (lr_str){p.s + 1, p.n - 1};
    }
    return p;
}

int lr_detokenize(const lr_vocab *v, const int32_t *ids, size_t n, bool special, char **text, size_t *len,
                  lr_error *err)
{
    size_t total = 1, o = 0;
    bool strip = v->add_space_prefix;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || (uint32_t)ids[i] >= v->n)
            return lr_fail(err, LR_EINVAL, "token id %d is not in the vocabulary of %u", ids[i], v->n);
        if (!lr_add(total, shown(v, ids[i], special, &strip).n, &total))
            return lr_fail(err, LR_ENOMEM, "no memory for the text of %zu tokens", n);
    }
    char *out = lr_malloc(total);
    if (!out) return lr_fail(err, LR_ENOMEM, "no memory for a text of %zu bytes", total);
    strip = v->add_space_prefix;
    for (size_t i = 0; i < n; i++) {
        lr_str p = shown(v, ids[i], special, &strip);
        if (p.n) memcpy(out + o, p.s, p.n);
        o += p.n;
    }
    out[o] = 0;
    *text = out;
    *len = o;
    return 0;
}

/* ---- streaming ---- */

void lr_detok_init(lr_detok *d, const lr_vocab *v, bool special)
{
    *d = (lr_detok){.v = v, .special = special, .strip = v->add_space_prefix};
}

#define PRIME_TOKENS 64

void lr_detok_prime(lr_detok *d, const int32_t *ids, size_t n)
{
    uint8_t tail[4];
    size_t k = 0; /* the last k bytes of the prompt's text, at the end of tail */
    size_t from = n > PRIME_TOKENS ? n - PRIME_TOKENS : 0, i = n;
    for (; i > from && k < 3; i--) {
        bool strip = false;
        lr_str p = shown(d->v, ids[i - 1], d->special, &strip);
        for (size_t j = p.n; j > 0 && k < 3; j--) tail[3 - ++k] = (uint8_t)p.s[j - 1];
    }
    for (i = from; i < n; i++) {
        if (i == from && from > 0) d->strip = false;
        shown(d->v, ids[i], d->special, &d->strip);
    }
    d->n_pend = 0;
    for (; k > 0; k--)
        if (lr_utf8_is_start(tail + 3 - k, k)) {
            memcpy(d->pend, tail + 3 - k, k);
            d->n_pend = (uint8_t)k;
            break;
        }
}

static size_t put_bad(char *buf) { return lr_utf8_put(0xFFFD, (uint8_t *)buf); }

/* Bytes of the piece that complete, or break off, the unfinished character: consumed; *o: bytes written. */
static size_t go_on(lr_detok *d, const uint8_t *s, size_t n, char *buf, size_t *o)
{
    size_t i = 0;
    while (d->n_pend && i < n) {
        int32_t cp;
        d->pend[d->n_pend] = s[i];
        size_t k = d->n_pend + 1u;
        if (lr_utf8_get(d->pend, k, &cp) == k && cp >= 0) {
            memcpy(buf + *o, d->pend, k);
            *o += k;
            d->n_pend = 0;
            i++;
        } else if (lr_utf8_is_start(d->pend, k)) {
            d->n_pend = (uint8_t)k;
            i++;
        } else {
            *o += put_bad(buf + *o);
            d->n_pend = 0;
        }
    }
    return i;
}

size_t lr_detok_push(lr_detok *d, int32_t id, char *buf, size_t cap)
{
    lr_str p = shown(d->v, id, d->special, &d->strip);
    const uint8_t *s = (const uint8_t *)p.s;
    size_t o = 0, i;
    assert(cap >= 3 * p.n + 9);
    for (i = go_on(d, s, p.n, buf, &o); i < p.n;) {
        int32_t cp;
        size_t k = lr_utf8_get(s + i, p.n - i, &cp);
        if (cp >= 0) {
            memcpy(buf + o, s + i, k);
            o += k;
        } else if (p.n - i < 4 && lr_utf8_is_start(s + i, p.n - i)) {
            k = p.n - i;
            memcpy(d->pend, s + i, k);
            d->n_pend = (uint8_t)k;
        } else {
            while (lr_utf8_is_start(s + i, k + 1)) k++; /* the maximal part of a character */
            o += put_bad(buf + o);
        }
        i += k;
    }
    return o;
}

size_t lr_detok_flush(lr_detok *d, char *buf, size_t cap)
{
    if (!d->n_pend) return 0;
    assert(cap >= 3);
    d->n_pend = 0;
    return put_bad(buf);
}
