/* error.c - see error.h */
#include "base/error.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* A cut must not leave half a UTF-8 character at the end. */
static void trim_utf8(char *s)
{
    size_t n = strlen(s), i = n;
    while (i > 0 && n - i < 4 && ((unsigned char)s[i - 1] & 0xC0) == 0x80) i--;
    if (i == 0) return;
    unsigned char c = (unsigned char)s[i - 1];
    size_t need = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC0 ? 2 : 1;
    if (n - (i - 1) < need) s[i - 1] = 0;
}

int lr_fail(lr_error *err, int code, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
    err->code = code;
    if (n >= (int)sizeof err->text) trim_utf8(err->text);
    return code;
}

int lr_fail_prefix(lr_error *err, const char *fmt, ...)
{
    char old[sizeof err->text];
    memcpy(old, err->text, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
    if (n >= 0 && n < (int)sizeof err->text) {
        n = snprintf(err->text + n, sizeof err->text - (size_t)n, ": %s", old);
        if (n >= 0) trim_utf8(err->text);
    }
    return err->code;
}

const char *lr_error_name(int code)
{
    switch (code) {
    case LR_OK:
        return "ok";
#define X(c, name, text)                                                                                               \
    case c:                                                                                                            \
        return name;
        LR_ERROR_LIST(X)
#undef X
    default:
        return "unknown";
    }
}
