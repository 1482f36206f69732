/* record.h - a record of all that decides what an engine does: what happens to sequences, who ran how many rows in
 * which step, who gave way, drafts, the tokens drawn, how requests end. With it a run can be repeated step by step.
 *
 * The record is text, a JSON object a line, kept in memory until it is taken; what each line means is told in
 * lua/README.md ("Record and replay"). Requests themselves are written by who makes them (lua/llmrun/record.lua), since
 * only it knows the samplers' and constraints' options. Costs some hundred nanoseconds a request and step.
 */
#ifndef LR_ENGINE_RECORD_H
#define LR_ENGINE_RECORD_H
#include "engine/engine.h"

typedef struct lr_record lr_record;

/* Begins a record, with the sequences that there are, or ends it and forgets what was not taken. Between steps.
 * LR_ENOMEM, LR_ESTATE. */
int lr_engine_record(lr_engine *, bool on, lr_error *err);
/* The lines since the last call, borrowed until the engine is used again. LR_ENOMEM: some are lost, and no further ones
 * are kept; LR_ESTATE: no record is kept. */
int lr_engine_record_take(lr_engine *, const char **text, size_t *n, lr_error *err);
/* For replays: rows of tokens that came without a choice are granted as asked for, not as measured times advise. */
void lr_engine_set_exact(lr_engine *, bool on);
/* For replays: an idle sequence gives its blocks to the prefix cache. False if it is not idle, or has none. Also in a
 * step. */
bool lr_seq_park(lr_seq *);

/* ---- what the engine's own files tell it; all do nothing when no record is kept ---- */

void lr_record__seq(lr_seq *);
void lr_record__fork(lr_seq *f, const lr_seq *of);
void lr_record__append(const lr_seq *, const int32_t *tokens, size_t n);
void lr_record__truncate(const lr_seq *);
void lr_record__pin(const lr_seq *, bool on);
void lr_record__free_seq(const lr_seq *);
void lr_record__forget(lr_engine *); /* cached prefixes */
void lr_record__begin_step(lr_engine *);
/* what: ':' = n rows were granted, '+' = it leaves n rows to others, '-' = there was no room for one of n rows (0: of
 * all), '!' and '~' = it gave way (computed again, swapped). */
void lr_record__decide(lr_engine *, const lr_request *, char what, int n);
/* An idle sequence gave up its blocks. */
void lr_record__park(const lr_seq *);
void lr_record__draft(const lr_request *, const int32_t *tokens, const int *parent, int n);
void lr_record__token(const lr_request *, int32_t id);
void lr_record__end(const lr_request *);
void lr_record__end_step(lr_engine *, double t0, double t1, int rows);
void lr_record__free(lr_engine *);

#endif
