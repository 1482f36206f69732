/* error.h - the one error shape of llmrun.
 *
 * A function that can fail for a reason outside our code returns int, 0 or a negative LR_E code, takes a trailing
 * lr_error * (never NULL) and fills it. Results come back through pointers, which are untouched on failure.
 * The text is bounded, ends in no full stop or newline, and names the thing at fault ("tensor blk.0.attn_q.weight:
 * ...").
 */
#ifndef LR_BASE_ERROR_H
#define LR_BASE_ERROR_H

/* code, name, meaning */
#define LR_ERROR_LIST(X)                                                                                               \
    X(LR_ENOMEM, "no_memory", "memory could not be allocated")                                                         \
    X(LR_EIO, "io", "the operating system refused a file or socket operation")                                         \
    X(LR_EFORMAT, "format", "a file or text is damaged or breaks its format")                                          \
    X(LR_EUNSUPPORTED, "unsupported", "well-formed, but not something this build can do")                              \
    X(LR_EINVAL, "invalid", "an argument is out of range or contradicts another")                                      \
    X(LR_ENOTFOUND, "not_found", "a name, key, tensor or file does not exist")                                         \
    X(LR_ESHAPE, "shape", "a tensor's shape does not fit its use")                                                     \
    X(LR_EFULL, "full", "a bounded pool, queue or context has no room")                                                \
    X(LR_ELIMIT, "limit", "a time, memory, nesting or step limit was hit")                                             \
    X(LR_ESTATE, "state", "not allowed in the object's present state")                                                 \
    X(LR_ECANCELLED, "cancelled", "the caller or the client gave up")                                                  \
    X(LR_ESCRIPT, "script", "a Lua script raised an error")

enum lr_errcode {
    LR_OK = 0,
    LR_ECODE_FIRST = -100,
#define X(code, name, text) code,
    LR_ERROR_LIST(X)
#undef X
};

typedef struct lr_error {
    int code;       /* LR_E... or 0 */
    char text[500]; /* the whole message, zero-terminated, valid UTF-8 */
} lr_error;

/* Fills err and returns code, so that `return lr_fail(err, LR_EIO, "...")` works. Longer text is cut. */
int lr_fail(lr_error *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Puts "what: " before the text that err holds; returns err->code. For adding context while unwinding. */
int lr_fail_prefix(lr_error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* "no_memory" for LR_ENOMEM; "ok" for 0; "unknown" for anything else. Static string. */
const char *lr_error_name(int code);

#endif
