"""Small models whose figures can be worked out on paper."""

from headwater.plan.shapes import LayerGroup, LayerKind, ModelShape, Weights

# Two layers, one KV head of 8 numbers: 2 * 8 = 16 elements a token; two query heads: 4 * 2 * 8 = 64 operations a pair.
SMALL = ModelShape(
    name="small",
    groups=(LayerGroup(LayerKind.FULL, 2, token_elements=16, kv_heads=1, pair_flops=64),),
    weights=Weights(embedding=100, head=100, tied=False, dense=1000),
    hidden_size=10,
    kv_width=2.0,
    dense_width=2.0,
    routed_width=2.0,
    tokens_max=4096,
)
