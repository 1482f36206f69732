/* normal.c - normalizers of tokenizer.json: Unicode's normal forms, case, marks, SentencePiece's compiled rules.
 *
 * The rules are a double-array trie as github.com/s-yata/darts-clone lays it out: a unit's offset leads to its
 * children, the child of byte c lies at (index ^ offset ^ c) and carries c as its label; a unit with a leaf bit has a
 * child 0 whose value is the place of the replacing text. Of the keys that begin a piece the shortest counts, as in
 * SentencePiece's reader in github.com/huggingface/spm_precompiled.
 */
#include "base/mem.h"
#include "text/pipe_int.h"
#include "text/unicode.h"
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* ---- normal forms ---- */

typedef struct chars {
    int32_t *a, *tmp;
    size_t n, cap;
} chars;

static int room(chars *c, size_t more, lr_error *err)
{
    if (c->n + more <= c->cap) return 0;
    size_t cap = c->cap * 2 + more + 256;
    int32_t *a = lr_reallocarray(c->a, cap, sizeof *a), *t = a ? lr_reallocarray(c->tmp, cap, sizeof *t) : NULL;
    if (a) c->a = a;
    if (t) c->tmp = t;
    if (!t) return lr_fail(err, LR_ENOMEM, "no memory to normalise a text");
    c->cap = cap;
    return 0;
}

static int put_chars(chars *c, utf8proc_option_t how, lr_bytes *out, lr_error *err)
{
    lr_uc_order_marks(c->a, c->n, c->tmp);
    if (how & UTF8PROC_COMPOSE) {
        utf8proc_ssize_t r = utf8proc_normalize_utf32(c->a, (utf8proc_ssize_t)c->n, how);
        if (r >= 0) c->n = (size_t)r;
    }
    for (size_t i = 0; i < c->n; i++) {
        uint8_t u[4];
        if (lr_bytes_add(out, u, lr_utf8_put(c->a[i], u), err)) return err->code;
    }
    c->n = 0;
    return 0;
}

int lr_normal_form(unsigned form, const uint8_t *s, size_t n, lr_bytes *out, lr_error *err)
{
    enum { MOST = 32 }; /* characters that one is decomposed into */
    utf8proc_option_t how =
        UTF8PROC_STABLE | (form == LR_UC_NFC || form == LR_UC_NFKC ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE);
    if (form >= LR_UC_NFKC) how |= UTF8PROC_COMPAT;
    chars c = {0};
    int rc = 0;
    for (size_t i = 0; i < n && !rc;) {
        int32_t cp;
        size_t k = lr_utf8_get(s + i, n - i, &cp);
        if (cp < 0 || (cp < 0x80 && c.n > 4096)) { /* nothing combines across either */
            if (c.n) rc = put_chars(&c, how, out, err);
            if (!rc && cp < 0) rc = lr_bytes_add(out, s + i, k, err);
        }
        if (cp >= 0 && !rc && !(rc = room(&c, MOST, err))) {
            int last = 0;
            utf8proc_ssize_t m = utf8proc_decompose_char(cp, c.a + c.n, MOST, how, &last);
            if (m < 1 || m > MOST) c.a[c.n] = cp, m = 1;
            c.n += (size_t)m;
        }
        i += k;
    }
    if (!rc && c.n) rc = put_chars(&c, how, out, err);
    lr_free(c.a);
    lr_free(c.tmp);
    return rc;
}

/* ---- characters ---- */

int lr_normal_lower(const uint8_t *s, size_t n, lr_bytes *out, lr_error *err)
{
    for (size_t i = 0; i < n;) {
        int32_t cp;
        uint8_t u[4];
        size_t k = lr_utf8_get(s + i, n - i, &cp);
        int rc = cp < 0        ? lr_bytes_add(out, s + i, k, err)
                 : cp == 0x130 ? lr_bytes_add(out, "i\xCC\x87", 3, err) /* the one that becomes two */
                               : lr_bytes_add(out, u, lr_utf8_put(utf8proc_tolower(cp), u), err);
        if (rc) return rc;
        i += k;
    }
    return 0;
}

static bool is_white(const uint8_t *s, size_t n)
{
    int32_t cp;
    lr_utf8_get(s, n, &cp);
    return lr_uc_class(cp) & LR_UC_WS;
}

int lr_normal_strip(const uint8_t *s, size_t n, bool left, bool right, lr_bytes *out, lr_error *err)
{
    size_t from = 0, to = n, last = 0;
    int32_t cp;
    while (left && from < n && is_white(s + from, n - from)) from += lr_utf8_get(s + from, n - from, &cp);
    for (size_t i = from; right && i < n;) { /* the end of the last character that is not white */
        size_t k = lr_utf8_get(s + i, n - i, &cp);
        if (!is_white(s + i, n - i)) last = i + k;
        i += k;
    }
    if (right) to = last > from ? last : from;
    return lr_bytes_add(out, s + from, to - from, err);
}

int lr_normal_unmark(const uint8_t *s, size_t n, lr_bytes *out, lr_error *err)
{
    for (size_t i = 0; i < n;) {
        int32_t cp;
        size_t k = lr_utf8_get(s + i, n - i, &cp);
        int rc = lr_uc_class(cp) & LR_UC_M ? 0 : lr_bytes_add(out, s + i, k, err);
        if (rc) return rc;
        i += k;
    }
    return 0;
}

/* ---- SentencePiece's rules ---- */

int lr_charsmap_init(lr_charsmap *m, lr_str blob, lr_error *err)
{
    uint32_t size = 0;
    if (blob.n >= 4) memcpy(&size, blob.s, 4);
    if (blob.n < 4 || size % 4 || size < 4 || size > blob.n - 4)
        return lr_fail(err, LR_EFORMAT, "a compiled normalizer of %zu bytes whose trie has %u", blob.n, size);
    m->trie = (const uint8_t *)blob.s + 4;
    m->units = size / 4;
    m->text = blob.s + 4 + size;
    m->text_n = blob.n - 4 - size;
    return 0;
}

static bool unit_at(const lr_charsmap *m, size_t i, uint32_t *u)
{
    if (i >= m->units) return false;
    memcpy(u, m->trie + 4 * i, 4);
    return true;
}

static size_t offset_of(uint32_t u) { return (size_t)(u >> 10) << ((u & 0x200) >> 6); }

/* What the shortest key at the beginning of s[0..n) is replaced by; false: no key begins it. */
static bool look_up(const lr_charsmap *m, const uint8_t *s, size_t n, lr_str *out)
{
    uint32_t u;
    if (!unit_at(m, 0, &u)) return false;
    size_t at = offset_of(u);
    for (size_t i = 0; i < n && s[i]; i++) {
        at ^= s[i];
        if (!unit_at(m, at, &u) || (u & 0x800000FFu) != s[i]) return false;
        at ^= offset_of(u);
        uint32_t value;
        if (!(u & 0x100)) continue;
        if (!unit_at(m, at, &value)) return false;
        size_t place = value & 0x7FFFFFFF;
        if (place > m->text_n) return false;
        const char *end = memchr(m->text + place, 0, m->text_n - place);
        *out = (lr_str){m->text + place, end ? (size_t)(end - m->text) - place : m->text_n - place};
        return true;
    }
    return false;
}

int lr_charsmap_run(const lr_charsmap *m, const uint8_t *s, size_t n, lr_bytes *out, lr_error *err)
{
    for (size_t i = 0; i < n;) {
        int32_t cp, next, state = 0;
        size_t end = i + lr_utf8_get(s + i, n - i, &cp);
        while (cp >= 0 && end < n) { /* to the end of the grapheme */
            size_t k = lr_utf8_get(s + end, n - end, &next);
            if (next < 0 || utf8proc_grapheme_break_stateful(cp, next, &state)) break;
            cp = next;
            end += k;
        }
        lr_str to;
        int rc = 0;
        if (end - i < 6 && look_up(m, s + i, end - i, &to)) {
            rc = lr_bytes_add(out, to.s, to.n, err);
            i = end;
        }
        while (i < end && !rc) {
            size_t k = lr_utf8_get(s + i, n - i, &cp);
            rc = look_up(m, s + i, k, &to) ? lr_bytes_add(out, to.s, to.n, err) : lr_bytes_add(out, s + i, k, err);
            i += k;
        }
        if (rc) return rc;
    }
    return 0;
}
