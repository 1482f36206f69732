--- The commands of llmrun, in the order of the help text: each is a module llmrun.cli.NAME.
return {
    "run", "chat", "serve", "inspect", "tokenize", "bench", "perplexity",
    "quantize", "imatrix", "compare", "profile", "simulate", "sweep", "tune", "trace", "test",
    "new",
    "attach", "replay",
}
