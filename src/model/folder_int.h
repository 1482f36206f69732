/* folder_int.h - the parts of a weight, checked: what folder.c keeps of them and convert.c reads. */
#ifndef LR_MODEL_FOLDER_INT_H
#define LR_MODEL_FOLDER_INT_H
#include "model/folder.h"

typedef struct lr_part {
    lr_part_kind kind;
    const char *name;           /* of w; borrowed from its file */
    const lr_safetensors *file; /* that w lies in */
    const uint8_t *w;           /* w_bytes */
    size_t w_bytes;
    const uint8_t *scale, *zero; /* NULL = none */
    int w_type, scale_type;      /* lr_dtype; MXFP4's scales have none */
    int bits, zero_offset;
    int64_t n, k;                   /* values that w holds, before a choice of rows */
    int64_t first, step, out;       /* rows that are taken */
    int64_t scale_rows, scale_cols; /* inputs and outputs that share a scale: row r, input i has (r / rows, i / cols) */
    int64_t groups;                 /* along k */
    int32_t *group;                 /* (k) of each input, or NULL: input / scale_cols */
    float mul, add;
    bool transpose;
} lr_part;

/* What the part's values are, seen from all its scales and zero points. LR_EFORMAT: a scale that is no number, a group
 * that does not exist. */
int lr_part_best(const lr_part *p, lr_made *made, lr_error *err);
/* Can the part be used as it lies in the file, in its own type? */
bool lr_part_is_view(const lr_part *p);
/* Writes rows r0..r1-1 of the part as rows of `type`: F32, F16, Q4_0, Q5_0, Q8_0, MXFP4, or a plain part's own type. */
void lr_part_rows(const lr_part *p, int type, int64_t r0, int64_t r1, void *dst);

#endif
