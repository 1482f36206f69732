/* pace_int.h - what pace.c (choosing) and account.c (measuring) share. */
#ifndef LR_SPEC_PACE_INT_H
#define LR_SPEC_PACE_INT_H
#include "spec/spec.h"

/* Seconds of a step with drafts of so many rows in all; as one without where none was seen. */
double lr_pace__drafted_time(const lr_pace *, int rows);
/* Seconds of a row that a draft has to catch up with, among many. */
double lr_pace__row_time(const lr_pace *, lr_spec_method);
/* What a step with drafts may take at worst: each row that was never seen as long as one of those that were. */
double lr_pace__worst_time(const lr_pace *, int rows);
/* Whether a step of so many rows was seen, or of about as many. */
bool lr_pace__has_seen(const lr_pace *, int rows);
/* How much longer drafts, passes and steps, take than the times that are known of them, next to plain steps. */
double lr_pace__dearer(const lr_pace *);
/* The account of batches of so many requests. */
struct lr_pace_account *lr_pace__account(lr_pace *, int requests);
/* Whether this step is to be one without drafts, because it must be known what such a step takes. */
bool lr_pace__wants_plain(const lr_pace *, int rows, bool drafting);

#endif
