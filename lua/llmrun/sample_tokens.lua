--- n ids that look like text: a fixed sequence over the vocabulary for each salt, without special tokens. For what
--- measures a model without caring what it says.
return function(model, n, salt)
    local ids, x = {}, (12345 + salt * 7919) % 2147483648
    local limit = math.min(model.info.n_vocab, 30000)
    while #ids < n do
        x = (x * 1103515245 + 12345) % 2147483648
        local id = x // 64 % limit
        local kind, ends = model.vocab:kind(id)
        if kind == "normal" and not ends then ids[#ids + 1] = id end
    end
    return ids
end
