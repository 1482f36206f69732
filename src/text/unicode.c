/* unicode.c - UTF-8, character classes and normal form C on top of utf8proc's tables.
 *
 * utf8proc decomposes and composes one character or one sorted buffer at a time; the canonical ordering between the
 * two is done here by a merge sort, because utf8proc's own takes quadratic time on a long run of mixed combining marks.
 */
#include "text/unicode.h"
#include "base/mem.h"
#include "text/unicode_newer.h"
#include <string.h>
#include <utf8proc.h>

size_t lr_utf8_get(const uint8_t *s, size_t n, int32_t *cp)
{
    uint8_t a = s[0];
    if (a < 0x80) {
        *cp = a;
        return 1;
    }
    *cp = -1;
    if (a < 0xC2 || a > 0xF4) return 1;
    if (n < 2 || (s[1] & 0xC0) != 0x80) return 1;
    if (a < 0xE0) {
        *cp = (a & 0x1F) << 6 | (s[1] & 0x3F);
        return 2;
    }
    if (n < 3 || (s[2] & 0xC0) != 0x80) return 1;
    if (a < 0xF0) {
        if ((a == 0xE0 && s[1] < 0xA0) || (a == 0xED && s[1] > 0x9F)) return 1;
        *cp = (a & 0x0F) << 12 | (s[1] & 0x3F) << 6 | (s[2] & 0x3F);
        return 3;
    }
    if (n < 4 || (s[3] & 0xC0) != 0x80) return 1;
    if ((a == 0xF0 && s[1] < 0x90) || (a == 0xF4 && s[1] > 0x8F)) return 1;
    *cp = (a & 0x07) << 18 | (s[1] & 0x3F) << 12 | (s[2] & 0x3F) << 6 | (s[3] & 0x3F);
    return 4;
}

size_t lr_utf8_put(int32_t cp, uint8_t *out)
{
    if (cp < 0x80) {
        out[0] = (uint8_t)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (uint8_t)(0xC0 | cp >> 6);
        out[1] = (uint8_t)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (uint8_t)(0xE0 | cp >> 12);
        out[1] = (uint8_t)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (uint8_t)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (uint8_t)(0xF0 | cp >> 18);
    out[1] = (uint8_t)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (uint8_t)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (uint8_t)(0x80 | (cp & 0x3F));
    return 4;
}

bool lr_utf8_is_start(const uint8_t *s, size_t k)
{
    uint8_t a = s[0];
    size_t need = a < 0xC2 ? 1 : a < 0xE0 ? 2 : a < 0xF0 ? 3 : a < 0xF5 ? 4 : 1;
    if (k >= need) return false;
    for (size_t i = 1; i < k; i++)
        if ((s[i] & 0xC0) != 0x80) return false;
    if (k < 2) return true;
    return !((a == 0xE0 && s[1] < 0xA0) || (a == 0xED && s[1] > 0x9F) || (a == 0xF0 && s[1] < 0x90) ||
             (a == 0xF4 && s[1] > 0x8F));
}

/* Bits of utf8proc's general categories. */
static const uint16_t class_of[] = {
    [UTF8PROC_CATEGORY_LU] = LR_UC_LU, [UTF8PROC_CATEGORY_LL] = LR_UC_LL, [UTF8PROC_CATEGORY_LT] = LR_UC_LT,
    [UTF8PROC_CATEGORY_LM] = LR_UC_LM, [UTF8PROC_CATEGORY_LO] = LR_UC_LO, [UTF8PROC_CATEGORY_MN] = LR_UC_M,
    [UTF8PROC_CATEGORY_MC] = LR_UC_M,  [UTF8PROC_CATEGORY_ME] = LR_UC_M,  [UTF8PROC_CATEGORY_ND] = LR_UC_N,
    [UTF8PROC_CATEGORY_NL] = LR_UC_N,  [UTF8PROC_CATEGORY_NO] = LR_UC_N,  [UTF8PROC_CATEGORY_PC] = LR_UC_P,
    [UTF8PROC_CATEGORY_PD] = LR_UC_P,  [UTF8PROC_CATEGORY_PS] = LR_UC_P,  [UTF8PROC_CATEGORY_PE] = LR_UC_P,
    [UTF8PROC_CATEGORY_PI] = LR_UC_P,  [UTF8PROC_CATEGORY_PF] = LR_UC_P,  [UTF8PROC_CATEGORY_PO] = LR_UC_P,
    [UTF8PROC_CATEGORY_SM] = LR_UC_S,  [UTF8PROC_CATEGORY_SC] = LR_UC_S,  [UTF8PROC_CATEGORY_SK] = LR_UC_S,
    [UTF8PROC_CATEGORY_SO] = LR_UC_S,  [UTF8PROC_CATEGORY_ZS] = LR_UC_WS, [UTF8PROC_CATEGORY_ZL] = LR_UC_WS,
    [UTF8PROC_CATEGORY_ZP] = LR_UC_WS, [UTF8PROC_CATEGORY_CO] = 0,
};

const uint16_t lr_uc_ascii[128] = {
    ['\t' ... '\r'] = LR_UC_WS,
    [' '] = LR_UC_WS,
    ['!' ... '#'] = LR_UC_P,
    ['$'] = LR_UC_S,
    ['%' ... '*'] = LR_UC_P,
    ['+'] = LR_UC_S,
    [',' ... '/'] = LR_UC_P,
    ['0' ... '9'] = LR_UC_N,
    [':' ... ';'] = LR_UC_P,
    ['<' ... '>'] = LR_UC_S,
    ['?' ... '@'] = LR_UC_P,
    ['A' ... 'Z'] = LR_UC_LU,
    ['[' ... ']'] = LR_UC_P,
    ['^'] = LR_UC_S,
    ['_'] = LR_UC_P,
    ['`'] = LR_UC_S,
    ['a' ... 'z'] = LR_UC_LL,
    ['{'] = LR_UC_P,
    ['|'] = LR_UC_S,
    ['}'] = LR_UC_P,
    ['~'] = LR_UC_S,
};

unsigned lr_uc_class_of(int32_t cp)
{
    if (cp < 0) return 0;
    if ((cp >= 9 && cp <= 13) || cp == 0x85) return LR_UC_WS;
    int category = utf8proc_get_property(cp)->category;
    if (category != UTF8PROC_CATEGORY_CN) return class_of[category];
    size_t lo = 0, hi = sizeof newer / sizeof *newer;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (newer[mid].last < cp)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < sizeof newer / sizeof *newer && newer[lo].first <= cp ? newer[lo].class : 0;
}

bool lr_uc_is_han(int32_t cp)
{
    static const int32_t r[][2] = {{0x2E80, 0x2E99},   {0x2E9B, 0x2EF3},   {0x2F00, 0x2FD5},   {0x3005, 0x3005},
                                   {0x3007, 0x3007},   {0x3021, 0x3029},   {0x3038, 0x303B},   {0x3400, 0x4DBF},
                                   {0x4E00, 0x9FFF},   {0xF900, 0xFA6D},   {0xFA70, 0xFAD9},   {0x16FE2, 0x16FE3},
                                   {0x16FF0, 0x16FF1}, {0x20000, 0x2A6DF}, {0x2A700, 0x2B739}, {0x2B740, 0x2B81D},
                                   {0x2B820, 0x2CEA1}, {0x2CEB0, 0x2EBE0}, {0x2EBF0, 0x2EE5D}, {0x2F800, 0x2FA1D},
                                   {0x30000, 0x3134A}, {0x31350, 0x323AF}};
    if (cp < 0x2E80) return false;
    for (size_t i = 0; i < sizeof r / sizeof *r; i++)
        if (cp <= r[i][1]) return cp >= r[i][0];
    return false;
}

/* ---- normal form C ---- */

static int ccc(int32_t cp) { return utf8proc_get_property(cp)->combining_class; }

/* Stable bottom-up merge sort of a run of combining marks by their class; tmp holds n. */
static void sort_marks(int32_t *a, size_t n, int32_t *tmp)
{
    for (size_t w = 1; w < n; w *= 2) {
        for (size_t lo = 0; lo < n; lo += 2 * w) {
            size_t mid = lo + w < n ? lo + w : n, hi = lo + 2 * w < n ? lo + 2 * w : n;
            size_t i = lo, j = mid, k = lo;
            while (i < mid || j < hi) tmp[k++] = j >= hi || (i < mid && ccc(a[i]) <= ccc(a[j])) ? a[i++] : a[j++];
        }
        memcpy(a, tmp, n * sizeof *a);
    }
}

void lr_uc_order_marks(int32_t *a, size_t n, int32_t *tmp)
{
    for (size_t i = 0; i < n;) {
        if (ccc(a[i]) == 0) {
            i++;
            continue;
        }
        size_t j = i + 1;
        bool sorted = true;
        for (; j < n && ccc(a[j]) != 0; j++)
            if (ccc(a[j]) < ccc(a[j - 1])) sorted = false;
        if (!sorted) sort_marks(a + i, j - i, tmp);
        i = j;
    }
}

/* Decomposes the valid characters s[0..n) into a (room for 4 n), orders and composes them, writes them to out. */
static size_t compose(const uint8_t *s, size_t n, int32_t *a, int32_t *tmp, uint8_t *out)
{
    size_t m = 0;
    for (size_t i = 0; i < n;) {
        int32_t cp;
        int last = 0;
        i += lr_utf8_get(s + i, n - i, &cp);
        utf8proc_ssize_t k = utf8proc_decompose_char(cp, a + m, 4, UTF8PROC_STABLE | UTF8PROC_COMPOSE, &last);
        if (k < 1 || k > 4) a[m] = cp, k = 1;
        m += (size_t)k;
    }
    lr_uc_order_marks(a, m, tmp);
    utf8proc_ssize_t r = utf8proc_normalize_utf32(a, (utf8proc_ssize_t)m, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (r >= 0) m = (size_t)r;
    size_t o = 0;
    for (size_t i = 0; i < m; i++) o += lr_utf8_put(a[i], out + o);
    return o;
}

/* Where the first character that normal form C might change begins: everything before U+0300 is safe unless a
 * combining character follows, so the start is one character before the first that is not. n: none. */
static size_t first_suspect(const uint8_t *s, size_t n)
{
    size_t prev = 0;
    for (size_t i = 0; i < n;) {
        int32_t cp;
        if (s[i] < 0x80) {
            prev = i++;
            continue;
        }
        size_t k = lr_utf8_get(s + i, n - i, &cp);
        if (cp >= 0x300) return prev;
        prev = i;
        i += k;
    }
    return n;
}

/* The end of a stretch of valid characters from s[i]; long ones are cut before an ASCII character, which neither
 * combines with nor moves across what stands before it. */
static size_t stretch_end(const uint8_t *s, size_t i, size_t n)
{
    size_t j = i;
    while (j < n && !(s[j] < 0x80 && j - i > 8192)) {
        int32_t cp;
        size_t k = lr_utf8_get(s + j, n - j, &cp);
        if (cp < 0) break;
        j += k;
    }
    return j;
}

int lr_uc_nfc(const uint8_t *s, size_t n, uint8_t **out, size_t *out_n, lr_error *err)
{
    size_t from = first_suspect(s, n), cap, o = from, room = 0;
    int32_t *a = NULL; /* decomposed: 4 characters a byte; as much again for sorting */
    uint8_t *buf = NULL;
    *out = NULL;
    *out_n = n;
    if (from >= n) return 0;
    /* No canonical decomposition has over 4 characters, and none is over 3 times as long in UTF-8. */
    if (!lr_mul(n, 3, &cap) || !(buf = lr_malloc(cap + 4))) goto fail;
    memcpy(buf, s, from);
    for (size_t i = from; i < n;) {
        size_t j = stretch_end(s, i, n);
        if (j - i > room) {
            int32_t *b = lr_reallocarray(a, j - i, 8 * sizeof *a);
            if (!b) goto fail;
            a = b;
            room = j - i;
        }
        if (j > i) o += compose(s + i, j - i, a, a + 4 * room, buf + o);
        i = j;
        int32_t cp;
        if (i < n && s[i] >= 0x80 && (lr_utf8_get(s + i, n - i, &cp), cp < 0)) buf[o++] = s[i++];
    }
    lr_free(a);
    if (o == n && memcmp(buf, s, n) == 0) {
        lr_free(buf);
        return 0;
    }
    *out = buf;
    *out_n = o;
    return 0;
fail:
    lr_free(buf);
    lr_free(a);
    return lr_fail(err, LR_ENOMEM, "no memory to normalise %zu bytes of text", n);
}
