"""Forward FLOPs of one row in matrix products, by closed forms: what the traced programs must agree with."""


def tower(sizes, image_size, out_width):
    """SigLIP over one image."""
    tokens = sizes.num_tokens(image_size)
    weights = 4 * sizes.width**2 + 2 * sizes.width * sizes.mlp_dim
    ends = 2 * tokens * sizes.width * (3 * sizes.patch_size**2 + out_width)
    return sizes.depth * (2 * tokens * weights + 4 * tokens**2 * sizes.width) + ends


def keys_and_values(sizes):
    """Of one token in one layer of Gemma."""
    keys = sizes.num_kv_heads * sizes.head_dim
    low_rank = sizes.lora.attention_rank * (2 * sizes.num_kv_heads * sizes.width + 2 * keys)
    return 2 * (2 * sizes.width * keys + low_rank)


def all_but_keys_and_values(sizes):
    """Of one token in the other weights of one layer of Gemma."""
    heads = sizes.num_heads * sizes.head_dim
    low_rank = sizes.lora.attention_rank * (sizes.num_heads * sizes.width + 2 * heads + sizes.width)
    low_rank += sizes.lora.mlp_rank * 3 * (sizes.width + sizes.mlp_dim)
    return 2 * (2 * sizes.width * heads + 3 * sizes.width * sizes.mlp_dim + low_rank)


def token(sizes):
    """Of one token in all layers of Gemma."""
    return sizes.depth * (keys_and_values(sizes) + all_but_keys_and_values(sizes))


def attention(sizes, queries, keys):
    """Of so many queries that look at so many keys, in one layer of Gemma."""
    return 4 * queries * keys * sizes.num_heads * sizes.head_dim


def prefix_tokens(config, cameras):
    """Of images and prompt."""
    return cameras * config.siglip.num_tokens(config.image_size) + config.rows.text_limit


def adaptive_norms_and_time(sizes):
    """Of one draw of the flow time."""
    return 2 * sizes.width**2 * (2 + 3 * (2 * sizes.depth + 1))


def pi0(config, cameras, draws=1, fixed_prefix=False):
    """pi0 and pi0.5. In the last layer the prefix has keys and values alone, but with knowledge insulation."""
    every = pi0_with_the_last_prefix(config, cameras, draws, fixed_prefix)
    return every - (0 if config.knowledge_insulation else dead_prefix(config, cameras, draws, fixed_prefix))


def dead_prefix(config, cameras, draws=1, fixed_prefix=False):
    """What openpi computes beyond it: the prefix in the last layer, past its keys and values; and in all layers the
    products of its queries with the suffix's keys, which are masked."""
    language, prefix = config.experts["language"], prefix_tokens(config, cameras)
    suffix = 0 if fixed_prefix else draws * config.action_horizon + (not config.pi05)
    masked = attention(language, prefix, suffix) * language.depth
    return prefix * all_but_keys_and_values(language) + attention(language, prefix, prefix) + masked


def pi0_with_the_last_prefix(config, cameras, draws, fixed_prefix=False):
    language, action = config.experts.values()
    steps, prefix = draws * config.action_horizon, prefix_tokens(config, cameras)
    suffix, is_seen = steps + (not config.pi05), not (config.knowledge_insulation or fixed_prefix)
    pairs = prefix * (prefix + is_seen * suffix) + suffix * (prefix + suffix)
    total = cameras * tower(config.siglip, config.image_size, language.width)
    total += prefix * token(language) + suffix * token(action) + attention(language, pairs, 1) * language.depth
    total += 4 * steps * config.action_dim * action.width  # from and to actions
    if config.pi05:
        total += draws * adaptive_norms_and_time(action)
    else:
        total += 2 * (config.action_dim * action.width + steps * 3 * action.width**2)
    if config.knowledge_insulation:
        total += 2 * (config.rows.text_limit - 1) * language.width * config.vocab_size
    return total


def pi0_fast(config, cameras):
    """pi0-FAST, the scores of its tokens included."""
    sizes, tokens = config.sizes, prefix_tokens(config, cameras) - 1
    scores = 2 * (config.rows.text_limit - 1) * sizes.width * config.vocab_size
    total = cameras * tower(config.siglip, config.image_size, sizes.width) + tokens * token(sizes)
    return total + attention(sizes, tokens, tokens) * sizes.depth + scores


def paligemma(config, cameras, draws=1):
    """PaliGemma with a flow head."""
    language, head = config.decoders.values()
    prefix, actions = prefix_tokens(config, cameras), draws * config.action_horizon
    total = cameras * tower(config.siglip, config.image_size, language.width) + prefix * token(language)
    total += attention(language, prefix, prefix) * language.depth
    total += 4 * (prefix + 1) * language.width * head.num_kv_heads * head.head_dim * head.depth  # the head's context
    total += actions * token(head) + attention(head, actions, prefix + 1 + actions) * head.depth
    total += draws * adaptive_norms_and_time(head)
    return total + 2 * (2 * actions * config.action_dim * head.width + config.action_dim * language.width)
