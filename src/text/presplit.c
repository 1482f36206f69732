/* presplit.c - the stages of presplit.h and the table of rules.
 *
 * Sources of the expressions: the pre_tokenizer sections of the models' public tokenizer.json files, and the names
 * under which github.com/ggml-org/llama.cpp writes them to GGUF files (src/llama-vocab.cpp). In what follows \s is the
 * Unicode property White_Space and letters, numbers, ... are general categories, as in the library that those files are
 * written for (tokenizers with oniguruma).
 *
 * A stage never looks at a character more than a few times: where an alternative scans ahead and fails, what follows
 * consumes what was scanned, or the stage tells its caller how far no match can begin.
 */
#include "text/presplit.h"
#include "text/unicode.h"
#include <string.h>

#define L  LR_UC_L
#define M  LR_UC_M
#define N  LR_UC_N
#define P  LR_UC_P
#define S  LR_UC_S
#define WS LR_UC_WS

/* Class of the character at s[i], i < n; *next: where the next one begins; *cp: the character. */
static inline unsigned at(const uint8_t *s, size_t i, size_t n, size_t *next, int32_t *cp)
{
    *next = i + lr_utf8_get(s + i, n - i, cp);
    return lr_uc_class(*cp);
}

static inline unsigned class_at(const uint8_t *s, size_t i, size_t n)
{
    size_t next;
    int32_t cp;
    return at(s, i, n, &next, &cp);
}

/* End of the run of characters from i whose class has a bit of `in` (any = none of `in`), at most `most` (0: any
 * number). */
static size_t run_in(const uint8_t *s, size_t i, size_t n, unsigned in, int most)
{
    for (int k = 0; i < n && (most == 0 || k < most); k++) {
        size_t next;
        int32_t cp;
        if (!(at(s, i, n, &next, &cp) & in)) break;
        i = next;
    }
    return i;
}

static size_t run_out(const uint8_t *s, size_t i, size_t n, unsigned out)
{
    while (i < n) {
        size_t next;
        int32_t cp;
        if (at(s, i, n, &next, &cp) & out) break;
        i = next;
    }
    return i;
}

static inline bool is_crlf(int32_t cp) { return cp == '\r' || cp == '\n'; }

/* 's 't 're 've 'm 'll 'd at s[i] -> its length or 0. any_case: as (?i:...), for which U+017F is an s too. */
static size_t contraction(const uint8_t *s, size_t i, size_t n, bool any_case)
{
    if (i + 1 >= n || s[i] != '\'') return 0;
    uint8_t a = s[i + 1], b = i + 2 < n ? s[i + 2] : 0;
    if (any_case) {
        if (a == 0xC5 && b == 0xBF) return 3;
        if (a >= 'A' && a <= 'Z') a |= 0x20;
        if (b >= 'A' && b <= 'Z') b |= 0x20;
    }
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return 0;
}

/* \s+(?!\S)|\s+ at white space: the run without its last character, if something follows it. With newlines (\s*[\r\n]+
 * stands before it): a run that holds a line end stops after the last one. */
static size_t white(const uint8_t *s, size_t i, size_t n, bool newlines)
{
    size_t end = i, last = i, line = i;
    while (end < n) {
        size_t next;
        int32_t cp;
        if (!(at(s, end, n, &next, &cp) & WS)) break;
        last = end;
        end = next;
        if (is_crlf(cp)) line = end;
    }
    if (newlines && line > i) return line;
    if (end == n || last == i) return end;
    return last;
}

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+   (GPT-2; ByteLevel's own) */
static bool st_gpt2(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    size_t k = contraction(s, i, n, false), q = i + (s[i] == ' ');
    if (k) return *end = i + k, true;
    unsigned c = q < n ? class_at(s, q, n) : WS;
    if (c & WS)
        *end = white(s, i, n, false);
    else if (c & L)
        *end = run_in(s, q, n, L, 0);
    else if (c & N)
        *end = run_in(s, q, n, N, 0);
    else
        *end = run_out(s, q, n, WS | L | N);
    return true;
}

enum {               /* flags of st_cl100k and st_o200k */
       NO_CONTR = 1, /* without the contractions */
       MARKS = 2,    /* words are [\p{L}\p{M}]+ and symbols [^\s\p{L}\p{M}\p{N}]+ */
       SLASH = 4,    /* symbols take [\r\n/]* along instead of [\r\n]* */
       NO_TAIL = 8,  /* symbols take nothing along */
       HAN = 16,     /* runs of script Han stand alone */
};

/* Numbers, symbols and white space, common to the two families below:
 * \p{N}{1,d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t rest(const lr_stage *p, const uint8_t *s, size_t i, size_t n, unsigned c)
{
    unsigned no = WS | L | N | (p->flags & MARKS ? M : 0);
    if (c & N) return run_in(s, i, n, N, p->digits);
    size_t q = i + (s[i] == ' ');
    if (q < n && !(class_at(s, q, n) & no)) {
        q = run_out(s, q, n, no);
        if (p->flags & NO_TAIL) return q;
        while (q < n && (is_crlf(s[q]) || (s[q] == '/' && p->flags & SLASH))) q++;
        return q;
    }
    return c & WS ? white(s, i, n, true) : i;
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 */
static bool st_cl100k(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    unsigned word = p->flags & MARKS ? L | M : L;
    size_t next, k = p->flags & NO_CONTR ? 0 : contraction(s, i, n, true);
    int32_t cp;
    if (k) return *end = i + k, true;
    unsigned c = at(s, i, n, &next, &cp);
    if (!(c & (L | N)) && !is_crlf(cp) && next < n && class_at(s, next, n) & word)
        *end = run_in(s, next, n, word, 0);
    else if (c & word)
        *end = run_in(s, i, n, word, 0);
    else
        *end = rest(p, s, i, n, c);
    return true;
}

#define UPPER (LR_UC_LU | LR_UC_LT | LR_UC_LM | LR_UC_LO | M)
#define LOWER (LR_UC_LL | LR_UC_LM | LR_UC_LO | M)

/* UPPER*LOWER+ (which = LOWER) or UPPER+LOWER* (UPPER) at s[i]: its end, or i. Once the first has failed, the second is
 * just the run of UPPER. no_han: characters of script Han belong to neither. */
static size_t cased(const uint8_t *s, size_t i, size_t n, unsigned which, bool no_han)
{
    size_t q = i, low = i; /* low: end of the last character of the run that is in LOWER too */
    unsigned c = 0;
    while (q < n) {
        size_t next;
        int32_t cp;
        c = at(s, q, n, &next, &cp);
        if (!(c & UPPER) || (no_han && lr_uc_is_han(cp))) break;
        q = next;
        if (c & LOWER) low = q;
    }
    if (which == UPPER) return q;
    size_t e = q;
    while (e < n) {
        size_t next;
        int32_t cp;
        c = at(s, e, n, &next, &cp);
        if (!(c & LOWER) || (no_han && lr_uc_is_han(cp))) break;
        e = next;
    }
    return e > q ? e : low;
}

/* [^\r\n\p{L}\p{N}]?UPPER*LOWER+(?i:'s|...)?|[^\r\n\p{L}\p{N}]?UPPER+LOWER*(?i:'s|...)?|\p{N}{1,3}|
 *  ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
 * with UPPER = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}], LOWER = [\p{Ll}\p{Lm}\p{Lo}\p{M}]
 * HAN: [\p{Han}]+| before all that, and UPPER and LOWER without Han. */
static bool st_o200k(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    bool han = p->flags & HAN;
    size_t next;
    int32_t cp;
    unsigned c = at(s, i, n, &next, &cp);
    if (han && lr_uc_is_han(cp)) {
        size_t q = next;
        while (q < n && (at(s, q, n, &next, &cp), lr_uc_is_han(cp))) q = next;
        return *end = q, true;
    }
    bool prefix = !(c & (L | N)) && !is_crlf(cp) && next < n;
    for (int k = 0; k < 2; k++) {
        unsigned which = k == 0 ? LOWER : UPPER;
        size_t q = prefix ? cased(s, next, n, which, han) : next;
        if (!prefix || q == next) {
            q = cased(s, i, n, which, han);
            if (q == i) continue;
        }
        if (!(p->flags & NO_CONTR)) q += contraction(s, q, n, true);
        return *end = q, true;
    }
    *end = rest(p, s, i, n, c);
    return true;
}

static inline bool ascii_letter(uint8_t c) { return (c | 0x20) >= 'a' && (c | 0x20) <= 'z'; }
static inline bool ascii_punct(int32_t c)
{
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

/* [!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 * NO_TAIL:  ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+ in place of the last four. */
static bool st_deepseek3(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    size_t next;
    int32_t cp;
    unsigned c = at(s, i, n, &next, &cp);
    if (ascii_punct(cp) && next < n && ascii_letter(s[next])) {
        while (next < n && ascii_letter(s[next])) next++;
        return *end = next, true;
    }
    if (!(c & (L | P | S)) && !is_crlf(cp) && next < n && class_at(s, next, n) & (L | M))
        return *end = run_in(s, next, n, L | M, 0), true;
    if (c & (L | M)) return *end = run_in(s, i, n, L | M, 0), true;
    size_t q = i + (s[i] == ' ');
    if (q < n && class_at(s, q, n) & (P | S)) {
        q = run_in(s, q, n, P | S, 0);
        while (!(p->flags & NO_TAIL) && q < n && is_crlf(s[q])) q++;
        return *end = q, true;
    }
    if (p->flags & NO_TAIL && is_crlf(cp)) return *end = next, true;
    if (c & WS) return *end = white(s, i, n, !(p->flags & NO_TAIL)), true;
    return *end = next, false;
}

/* \p{N}{1,d}, or \p{N}+ */
static bool st_digits(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    *end = run_in(s, i, n, N, p->digits);
    if (*end > i) return true;
    return *end = run_out(s, i, n, N), false;
}

/* [0-9][0-9][0-9] */
static bool st_three(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    size_t k = 0;
    while (k < 3 && i + k < n && s[i + k] >= '0' && s[i + k] <= '9') k++;
    *end = i + (k ? k : 1);
    return k == 3;
}

/* [\r\n]; with flags: [^\n]+|[\n]+ */
static bool st_lines(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    size_t q = i + 1;
    if (p->flags) {
        while (q < n && (s[q] == '\n') == (s[i] == '\n')) q++;
        return *end = q, true;
    }
    if (is_crlf(s[i])) return *end = q, true;
    while (q < n && !is_crlf(s[q])) q++;
    return *end = q, false;
}

static bool in_ranges(const int32_t (*r)[2], int32_t cp)
{
    for (; r[0][1]; r++)
        if (cp <= r[0][1]) return cp >= r[0][0];
    return false;
}

/* What st_run looks for: a character of one of the ranges, of one of the classes in flags, or ASCII punctuation. */
#define SPACE_FIRST (1u << 30) /* \s? before the run */
#define ASCII_PUNCT (1u << 29)
static bool wanted(const lr_stage *p, unsigned c, int32_t cp)
{
    return c & p->flags || (p->flags & ASCII_PUNCT && ascii_punct(cp)) || (p->ranges && in_ranges(p->ranges, cp));
}

/* \s?[...]+ or [...]+ */
static bool st_run(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    size_t q = i, next;
    int32_t cp;
    unsigned c = at(s, i, n, &next, &cp);
    *end = next;
    if (p->flags & SPACE_FIRST && c & WS && next < n) {
        q = next;
        c = at(s, q, n, &next, &cp);
        if (!wanted(p, c, cp)) {
            q = i;
            c = at(s, q, n, &next, &cp);
        }
    }
    if (!wanted(p, c, cp)) return false;
    for (q = next; q < n && (c = at(s, q, n, &next, &cp), wanted(p, c, cp));) q = next;
    return *end = q, true;
}

/* \s+$ */
static bool st_trailing(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    *end = run_in(s, i, n, WS, 0);
    if (*end == i) return *end = run_out(s, i, n, WS), false;
    return *end == n;
}

/*  ?[^(\s|.,!?...)]+ : a word with the space before it, cut at white space and some punctuation */
static bool bloom_stop(unsigned c, int32_t cp)
{
    static const int32_t stops[] = {'(',    ')',    '|',    '.',    ',',    '!',    '?',
                                    0x2026, 0x3002, 0xFF0C, 0x3001, 0x0964, 0x06D4, 0x060C};
    if (c & WS) return true;
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++)
        if (cp == stops[i]) return true;
    return false;
}

static bool st_bloom(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end)
{
    size_t q = i + (s[i] == ' '), from = q;
    while (q < n) {
        size_t next;
        int32_t cp;
        unsigned c = at(s, q, n, &next, &cp);
        if (bloom_stop(c, cp)) break;
        q = next;
    }
    if (q > from) return *end = q, true;
    size_t next;
    int32_t cp;
    at(s, i, n, &next, &cp);
    return *end = next, false;
}

/* ---- the rules ---- */

/* Letters of the scripts that have case (deepseek-llm). */
static const int32_t cased_letters[][2] = {
    {'A', 'Z'},         {'a', 'z'},         {0xB5, 0xB5},       {0xC0, 0xD6},       {0xD8, 0xF6},
    {0xF8, 0x1BA},      {0x1BC, 0x1BF},     {0x1C4, 0x293},     {0x295, 0x2AF},     {0x370, 0x373},
    {0x376, 0x377},     {0x37B, 0x37D},     {0x37F, 0x37F},     {0x386, 0x386},     {0x388, 0x38A},
    {0x38C, 0x38C},     {0x38E, 0x3A1},     {0x3A3, 0x3F5},     {0x3F7, 0x481},     {0x48A, 0x52F},
    {0x531, 0x556},     {0x10A0, 0x10C5},   {0x13A0, 0x13F5},   {0x13F8, 0x13FD},   {0x1C90, 0x1CBA},
    {0x1CBD, 0x1CBF},   {0x1D00, 0x1D2B},   {0x1D6B, 0x1D77},   {0x1D79, 0x1D9A},   {0x1E00, 0x1F15},
    {0x1F18, 0x1F1D},   {0x1F20, 0x1F45},   {0x1F48, 0x1F4D},   {0x1F50, 0x1F57},   {0x1F59, 0x1F59},
    {0x1F5B, 0x1F5B},   {0x1F5D, 0x1F5D},   {0x1F5F, 0x1F7D},   {0x1F80, 0x1FB4},   {0x1FB6, 0x1FBC},
    {0x1FBE, 0x1FBE},   {0x1FC2, 0x1FC4},   {0x1FC6, 0x1FCC},   {0x1FD0, 0x1FD3},   {0x1FD6, 0x1FDB},
    {0x1FE0, 0x1FEC},   {0x1FF2, 0x1FF4},   {0x1FF6, 0x1FFC},   {0x2102, 0x2102},   {0x2107, 0x2107},
    {0x210A, 0x2113},   {0x2115, 0x2115},   {0x2119, 0x211D},   {0x2124, 0x2124},   {0x2126, 0x2126},
    {0x2128, 0x2128},   {0x212A, 0x212D},   {0x212F, 0x2134},   {0x2139, 0x2139},   {0x213C, 0x213F},
    {0x2145, 0x2149},   {0x214E, 0x214E},   {0x2183, 0x2184},   {0x2C00, 0x2C7B},   {0x2C7E, 0x2CE4},
    {0x2CEB, 0x2CEE},   {0x2CF2, 0x2CF3},   {0xA640, 0xA66D},   {0xA680, 0xA69B},   {0xA722, 0xA76F},
    {0xA771, 0xA787},   {0xA78B, 0xA78E},   {0xAB70, 0xABBF},   {0xFB00, 0xFB06},   {0xFB13, 0xFB17},
    {0xFF21, 0xFF3A},   {0xFF41, 0xFF5A},   {0x10400, 0x1044F}, {0x104B0, 0x104D3}, {0x104D8, 0x104FB},
    {0x10C80, 0x10CB2}, {0x10CC0, 0x10CF2}, {0x118A0, 0x118DF}, {0x1E900, 0x1E943}, {0, 0}};
/* [!-/:-~！-／：-～‘-‟　-。] */
static const int32_t marks[][2] = {{'!', '/'},       {':', '~'}, {0x2018, 0x201F}, {0x3000, 0x3002}, {0xFF01, 0xFF0F},
                                   {0xFF1A, 0xFF5E}, {0, 0}};
/* [一-龥ࠀ-一가-퟿] */
static const int32_t cjk_wide[][2] = {{0x800, 0x9FA5}, {0xAC00, 0xD7FF}, {0, 0}};
/* [一-龥぀-ゟ゠-ヿ] */
static const int32_t cjk_kana[][2] = {{0x3040, 0x30FF}, {0x4E00, 0x9FA5}, {0, 0}};
/* The default rule's [\p{P}\$\+<=>\^~\|]; falcon's has ` too. */
static const int32_t symbols[][2] = {{'$', '$'}, {'+', '+'}, {'<', '>'}, {'^', '^'}, {'|', '|'}, {'~', '~'}, {0, 0}};

#define GPT2                                                                                                           \
    {                                                                                                                  \
        .match = st_gpt2                                                                                               \
    }
#define ONE_DIGIT                                                                                                      \
    {                                                                                                                  \
        .match = st_digits, .digits = 1                                                                                \
    }
#define THREE_DIGITS                                                                                                   \
    {                                                                                                                  \
        .match = st_digits, .digits = 3                                                                                \
    }
#define ANY_DIGITS                                                                                                     \
    {                                                                                                                  \
        .match = st_digits                                                                                             \
    }
#define CL100K(d, f)                                                                                                   \
    {                                                                                                                  \
        .match = st_cl100k, .digits = (d), .flags = (f)                                                                \
    }
#define O200K(d, f)                                                                                                    \
    {                                                                                                                  \
        .match = st_o200k, .digits = (d), .flags = (f)                                                                 \
    }
#define CHARS(f, r)                                                                                                    \
    {                                                                                                                  \
        .match = st_run, .flags = (f), .ranges = (r)                                                                   \
    }
#define LINE_ENDS                                                                                                      \
    {                                                                                                                  \
        .match = st_lines                                                                                              \
    }

static const lr_pre rules[] = {
    {" gpt-2 phi-2 gigachat jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe a.x-4.0 mellum "
     "exaone4 jais trillion granite-docling ",
     .stage = {GPT2}},
    {" olmo mpt modern-bert ", .nfc = true, .stage = {GPT2}},
    {" smollm starcoder refact codeshell exaone minerva-7b mellum2 ", .stage = {ONE_DIGIT, GPT2}},
    {" command-r ", .nfc = true, .stage = {ONE_DIGIT, GPT2}},
    {" qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 ", .nfc = true, .stage = {CL100K(1, 0)}},
    {" hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe ", .stage = {CL100K(1, 0)}},
    {" qwen35 ", .nfc = true, .stage = {CL100K(1, MARKS)}},
    {" seed-coder ", .stage = {CL100K(1, NO_TAIL)}},
    {" ufakzeka ", .stage = {CL100K(1, NO_CONTR)}},
    {" laguna ", .stage = {{.match = st_lines, .flags = 1}, CL100K(1, 0)}},
    {" llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano ", .whole = true, .bos = true,
     .stage = {CL100K(3, 0)}},
    {" dbrx smaug-bpe chatglm-bpe glm4 ", .stage = {CL100K(3, 0)}},
    {" tekken ", .whole = true, .bos = true, .stage = {O200K(1, SLASH | NO_CONTR)}},
    {" gpt-4o llama4 kanana2 talkie minimax-m2 ", .stage = {O200K(3, SLASH)}},
    {" kimi-k2 ", .stage = {O200K(3, HAN)}},
    {" deepseek-llm ", .stage = {LINE_ENDS,
                                 CHARS(SPACE_FIRST, cased_letters),
                                 CHARS(SPACE_FIRST, marks),
                                 {.match = st_trailing},
                                 CHARS(0, cjk_wide),
                                 ANY_DIGITS}},
    {" deepseek-coder ",
     .stage = {LINE_ENDS, CHARS(SPACE_FIRST | L, NULL), CHARS(SPACE_FIRST | P, NULL), CHARS(0, cjk_wide), ONE_DIGIT}},
    {" deepseek-v3 hunyuan-dense joyai-llm hy_v4 ",
     .stage = {THREE_DIGITS, CHARS(0, cjk_kana), {.match = st_deepseek3}}},
    {" spark2_5 ", .stage = {THREE_DIGITS, CHARS(0, cjk_kana), {.match = st_deepseek3, .flags = NO_TAIL}, ONE_DIGIT}},
    {" falcon ", .stage = {CHARS(P | ASCII_PUNCT, NULL), GPT2, {.match = st_three}}},
    {" default ", .stage = {CHARS(P, symbols), GPT2, ANY_DIGITS, {.match = st_three}}},
    {" bloom poro-chat gpt3-finnish ", .stage = {{.match = st_bloom}}},
    {" viking ", .stage = {{.match = st_bloom}, ONE_DIGIT}},
};

const lr_pre *lr_pre_find(const char *name)
{
    size_t n = name ? strlen(name) : 0;
    if (n == 0 || strchr(name, ' ')) return NULL;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (const char *p = strstr(rules[i].names, name); p; p = strstr(p + 1, name))
            if (p[-1] == ' ' && p[n] == ' ') return &rules[i];
    return NULL;
}

typedef struct split {
    const lr_pre *pre;
    const uint8_t *s;
    int (*word)(void *ctx, size_t start, size_t end);
    void *ctx;
} split;

/* Stage k on s[from..to). */
static int cut(const split *sp, int k, size_t from, size_t to)
{
    const lr_stage *st = k < LR_PRE_STAGES ? &sp->pre->stage[k] : NULL;
    if (from == to) return 0;
    if (!st || !st->match) return sp->word(sp->ctx, from, to);
    size_t gap = from, i = from;
    while (i < to) {
        size_t end = i + 1;
        bool hit = st->match(st, sp->s + from, i - from, to - from, &end);
        end += from;
        int rc = 0;
        if (hit && ((gap < i && (rc = cut(sp, k + 1, gap, i))) || (rc = cut(sp, k + 1, i, end)))) return rc;
        if (hit) gap = end;
        i = end;
    }
    return cut(sp, k + 1, gap, to);
}

int lr_presplit(const lr_pre *pre, const uint8_t *s, size_t n, int (*word)(void *ctx, size_t start, size_t end),
                void *ctx)
{
    split sp = {pre, s, word, ctx};
    return cut(&sp, 0, 0, n);
}
