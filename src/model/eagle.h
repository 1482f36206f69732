/* eagle.h - a draft of a layer or a few that goes on where its target's features leave off (EAGLE).
 *
 * Feature i is what the target makes of the tokens up to position i: its final hidden row, or rows from the ends of
 * three of its layers side by side. A row of the draft takes feature i and token i + 1 and says feature i + 1, from
 * which the target's own matrix, or one of the draft's, has the chances of token i + 2. So a draft is an lr_model whose
 * batches need input rows (lr_batch.input, n_embd wide) besides tokens, and whose hidden rows are the input of the rows
 * behind them. KV of its own; embedding and matrix are the target's where the file has none.
 *
 * Files are safetensors with the names that published heads have. First shape (EAGLE, EAGLE-2): fc.weight (d, 2d) and
 * perhaps fc.bias, over the token's embedding, then the feature; layers.<i>.self_attn.{q,k,v,o}_proj, layers.<i>.mlp.
 * {gate,up,down}_proj, layers.<i>.post_attention_layernorm and, but for layer 0, input_layernorm. Second shape
 * (EAGLE-3): fc.weight (d, 3 t) over the rows of three layers; midlayer.hidden_norm, midlayer.input_layernorm and the
 * rest of a layer whose q, k and v take 2d; norm.weight. Both: embed_tokens.weight, and lm_head.weight of a vocabulary
 * of its own, where d2t (I64) says how much larger the target's id is than the draft's. Engine thread only.
 */
#ifndef LR_MODEL_EAGLE_H
#define LR_MODEL_EAGLE_H
#include "model/model.h"

typedef struct lr_eagle_config {
    int n_heads, n_kv_heads, head_dim;
    float eps, rope_base;
    int taps[3]; /* EAGLE-3: layers before each part of a feature, as the head's file says; 0 = 2, half, all but 3 */
    bool as_is;  /* keeps the types of matrices; else they are rounded to Q8_0 */
} lr_eagle_config;

/* The draft of a started target, which must outlive it, unchanged. LR_EFORMAT, LR_ESHAPE: the file does not fit;
 * LR_EUNSUPPORTED: the target can't tell its features. The target tells them from now on: lr_batch.features, rows of
 * lr_eagle_width. */
int lr_eagle_new(lr_model **out, lr_model *target, const char *path, const lr_eagle_config *cfg, lr_error *err);
/* Floats of a row of the target's features. */
int lr_eagle_width(const lr_model *);
/* Features (n, width) -> input rows (n, n_embd), of a started draft; n at most its max_rows. */
int lr_eagle_input(lr_model *, const float *features, int n, float *out, lr_error *err);

#endif
