/* use.c - compiled against the installed C library: a scripted model, and one that is not there. */
#include <llmrun.h>
#include <stdio.h>

int main(void)
{
    llmrun *m;
    llmrun_session *s;
    llmrun_result r;
    llmrun_error err;
    if (llmrun_open(&m, "/none.gguf", NULL, &err) == 0) return 1;
    printf("%s: %s\n", llmrun_error_name(err.code), err.text);
    const char *text = "return require('llmrun').scripted { next = function(t) return 64 + #t end }";
    if (llmrun_open_lua(&m, text, &err) || llmrun_session_new(m, &s, &err) || llmrun_add_text(s, "x", 1, &err)) {
        printf("%s\n", err.text);
        return 1;
    }
    llmrun_gen g = llmrun_gen_defaults();
    g.max_tokens = 3;
    if (llmrun_generate(s, &g, &r, &err)) {
        printf("%s\n", err.text);
        return 1;
    }
    printf("llmrun %s says %s\n", llmrun_version(), r.text);
    llmrun_session_free(s);
    llmrun_close(m);
    return 0;
}
