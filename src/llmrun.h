/* llmrun.h - the public C interface: load a model, hold conversations with it, take its tokens.
 *
 *   llmrun *m; llmrun_session *s; llmrun_result r; llmrun_error err;
 *   if (llmrun_open(&m, "model.gguf", NULL, &err)) die(err.text);
 *   llmrun_session_new(m, &s, &err);
 *   llmrun_add_message(s, "user", "Name a prime above 100.", &err);
 *   llmrun_gen g = llmrun_gen_defaults();
 *   if (llmrun_generate(s, &g, &r, &err) == 0) puts(r.text);
 *   llmrun_session_free(s); llmrun_close(m);
 *
 * Functions that can fail return 0 (or a count) or a negative code, and fill err, which is never NULL; results come
 * back through pointers, which are untouched on failure. Several sessions can generate at once: llmrun_start each, then
 * llmrun_step until llmrun_poll has them; their tokens share batches. A model and its sessions belong to one thread at
 * a time. Strings are UTF-8, zero-terminated unless a length goes with them.
 */
#ifndef LLMRUN_H
#define LLMRUN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LLMRUN_API __attribute__((visibility("default")))

typedef struct llmrun llmrun;                 /* a model with its engine */
typedef struct llmrun_session llmrun_session; /* a sequence of tokens with its KV, perhaps a chat */

typedef struct llmrun_error {
    int code; /* negative; llmrun_error_name gives its name */
    char text[500];
} llmrun_error;

LLMRUN_API const char *llmrun_version(void);        /* "0.1.0" */
LLMRUN_API const char *llmrun_error_name(int code); /* "full", "not_found", ... */

/* ---- models ---- */

/* 0 and NULL mean the default. */
typedef struct llmrun_options {
    int threads;          /* all processors */
    int context;          /* the model's */
    int max_batch_tokens; /* rows of one step, 512 */
    int max_sessions;     /* that generate at once, 64 */
    int block_size;       /* tokens of a KV block, 16 */
    size_t kv_bytes;      /* memory of the KV pool */
    const char *device;   /* "cpu", "cuda:0" */
    const char *compute;  /* "fast"; "f32": the exact, slow reference path */
    const char *kv_type;  /* "f16"; "f32", "bf16", "q8_0", "q4_0"; on GPUs "fp8" */
} llmrun_options;

/* Loads a GGUF file, a folder that holds one, or a model by the name that scripts/fetch_model knows. options may be
 * NULL. */
LLMRUN_API int llmrun_open(llmrun **out, const char *model, const llmrun_options *options, llmrun_error *err);
/* The model that a piece of Lua returns: return require("llmrun").load("model.gguf", { policy = "fair" }). */
LLMRUN_API int llmrun_open_lua(llmrun **out, const char *text, llmrun_error *err);
/* Frees it and its sessions: their handles are dead. NULL is allowed. */
LLMRUN_API void llmrun_close(llmrun *);

LLMRUN_API const char *llmrun_name(const llmrun *); /* borrowed */
LLMRUN_API int llmrun_vocab_size(const llmrun *);
LLMRUN_API int llmrun_context(const llmrun *);                /* longest session in tokens */
LLMRUN_API bool llmrun_is_end(const llmrun *, int32_t token); /* ends a generation */

/* *ids is freed with llmrun_free. special: names of special tokens in the text are those tokens; bos: with what the
 * model wants at a text's beginning. */
LLMRUN_API int llmrun_tokenize(const llmrun *, const char *text, size_t n, bool special, bool bos, int32_t **ids,
                               size_t *n_ids, llmrun_error *err);
/* *text: zero-terminated, freed with llmrun_free. special: control tokens show their names. */
LLMRUN_API int llmrun_detokenize(const llmrun *, const int32_t *ids, size_t n, bool special, char **text,
                                 size_t *n_text, llmrun_error *err);
LLMRUN_API void llmrun_free(void *);

/* ---- sessions ---- */

LLMRUN_API int llmrun_session_new(llmrun *, llmrun_session **out, llmrun_error *err);
/* Ends what it generates. NULL is allowed. */
LLMRUN_API void llmrun_session_free(llmrun_session *);
/* A session that goes on from here and shares the KV. */
LLMRUN_API int llmrun_session_fork(llmrun_session *, llmrun_session **out, llmrun_error *err);

/* Adds a message of a chat; role: "system", "user", "assistant", "tool". Rendered with the model's chat template when
 * an answer is asked for; only the template's own text is searched for special tokens. */
LLMRUN_API int llmrun_add_message(llmrun_session *, const char *role, const char *content, llmrun_error *err);
/* Adds plain text, or tokens. A text at the very beginning gets the BOS token that the model wants. */
LLMRUN_API int llmrun_add_text(llmrun_session *, const char *text, size_t n, llmrun_error *err);
LLMRUN_API int llmrun_add_tokens(llmrun_session *, const int32_t *ids, size_t n, llmrun_error *err);

LLMRUN_API size_t llmrun_length(const llmrun_session *);
LLMRUN_API const int32_t *llmrun_tokens(const llmrun_session *); /* borrowed until the session changes */
/* Cuts a session of plain text or tokens to its first n tokens. */
LLMRUN_API int llmrun_rewind(llmrun_session *, size_t n, llmrun_error *err);

/* ---- generating ---- */

typedef struct llmrun_gen {
    int max_tokens;                                                /* -1: to the end of the context */
    float temperature;                                             /* 1; 0: the most probable token */
    int top_k;                                                     /* 0: off */
    float top_p, min_p;                                            /* 1 and 0: off */
    float repetition_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0: off */
    uint64_t seed;                                                 /* same seed, same text */
    const char *const *stop;                                       /* ends at one of these texts; copied */
    size_t n_stop;
    bool ignore_eos; /* end tokens are taken like others */
    /* Called between steps with new text: whole characters, nothing of a stop text. Nonzero ends the request. */
    int (*on_text)(void *user, const char *text, size_t n);
    void *user;
} llmrun_gen;
LLMRUN_API llmrun_gen llmrun_gen_defaults(void);

typedef struct llmrun_result {
    const char *text; /* valid, as tokens, until the next call with the session */
    size_t n_text;
    const int32_t *tokens;
    size_t n_tokens;
    const char *finish;        /* "stop", "length", "cancelled" */
    int n_prompt, n_cached;    /* tokens before the answer; how many of them needed no computing */
    double first_token, total; /* seconds since the start */
} llmrun_result;

/* Queues an answer. gen may be NULL. One at a time for a session. */
LLMRUN_API int llmrun_start(llmrun_session *, const llmrun_gen *gen, llmrun_error *err);
/* One step for all sessions that generate: the rows that ran, 0 if there is nothing to do. */
LLMRUN_API int llmrun_step(llmrun *, llmrun_error *err);
/* 1 and *out when the answer is there (once), 0 while it is not. Negative if it failed. */
LLMRUN_API int llmrun_poll(llmrun_session *, llmrun_result *out, llmrun_error *err);
/* Ends it; llmrun_poll then gives what there is. */
LLMRUN_API void llmrun_cancel(llmrun_session *);
/* Start, step and poll in one. */
LLMRUN_API int llmrun_generate(llmrun_session *, const llmrun_gen *gen, llmrun_result *out, llmrun_error *err);
/* The logits (llmrun_vocab_size) for the next token: *out is valid until the next step, and may be written to. */
LLMRUN_API int llmrun_logits(llmrun_session *, float **out, llmrun_error *err);

/* ---- the program ---- */

/* Runs a command line as the llmrun program does; returns the exit status. */
LLMRUN_API int llmrun_main(int argc, char **argv);

#ifdef __cplusplus
}
#endif
#endif
