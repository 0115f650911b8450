"""Models of images: transformers, convolutional networks, segmentation and detection."""

from __future__ import annotations

import torch

from .build import LABELS, Family, classes, model_of

SIZE = 32  # pixels a side, where a family does not need more
VIT = dict(
    image_size=SIZE, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    num_labels=LABELS,
)  # fmt: skip

# options, and the pixels a side if not SIZE
CLASSIFIERS = {
    "vit": VIT | dict(num_hidden_layers=1),
    "beit": VIT,
    "data2vec-vision": VIT,
    "deit": VIT,
    "dinov2": VIT,
    "dinov2_with_registers": VIT,
    "ijepa": VIT,
    "vit_msn": VIT,
    "bit": dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_groups=4),
    "convnext": dict(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "convnextv2": dict(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "cvt": dict(embed_dim=[16, 32], num_heads=[2, 4], depth=[1, 2], patch_sizes=[7, 3], patch_stride=[4, 2],
                patch_padding=[2, 1], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0],
                drop_path_rate=[0.0, 0.0], qkv_bias=[True, True], cls_token=[False, True],
                qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2],
                padding_q=[1, 1], stride_q=[1, 1]),
    "efficientnet": dict(width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320, image_size=SIZE),
    "focalnet": dict(embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3],
                     image_size=SIZE),
    "hiera": dict(image_size=[SIZE, SIZE], embed_dim=16, depths=[1, 1], num_heads=[2, 4], query_stride=[2, 2],
                  num_query_pool=1, masked_unit_size=[4, 4], masked_unit_attention=[True, False]),
    "hgnet_v2": dict(embedding_size=16, stem_channels=[3, 8, 16], hidden_sizes=[16, 32], depths=[1, 1],
                     stage_in_channels=[16, 16], stage_mid_channels=[8, 8], stage_out_channels=[16, 32],
                     stage_num_blocks=[1, 1], stage_downsample=[False, True],
                     stage_light_block=[False, True], stage_kernel_size=[3, 3], stage_numb_of_layers=[2, 2]),
    "levit": dict(image_size=SIZE, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 4, 6], depths=[1, 1, 1],
                  key_dim=[8, 8, 8], mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2],
                  down_ops=[["Subsample", 8, 2, 2, 2, 2],
                                                                            ["Subsample", 8, 4, 2, 2, 2]]),
    "mobilenet_v1": dict(depth_multiplier=0.125, min_depth=8),
    "mobilenet_v2": dict(depth_multiplier=0.125, min_depth=8, depth_divisible_by=8),
    "mobilevit": dict(image_size=SIZE, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
                      num_attention_heads=4),
    "poolformer": dict(hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2],
                       padding=[2, 1]),
    "pvt": dict(image_size=SIZE, num_encoder_blocks=2, depths=[1, 1], sequence_reduction_ratios=[2, 1],
                hidden_sizes=[16, 32], patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[2, 4],
                mlp_ratios=[2, 2]),
    "pvt_v2": dict(image_size=SIZE, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32],
                   patch_sizes=[7, 3],
                   strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2]),
    "regnet": dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    "resnet": dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"),
    "segformer": dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
                      strides=[4, 2],
                      num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=16),
    "swiftformer": dict(image_size=SIZE, depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 32], mlp_ratio=2),
    "swin": dict(image_size=SIZE, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "swinv2": dict(image_size=SIZE, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
}  # fmt: skip


# AutoModelForImageClassification has two classes for these
CLASSES = {"deit": "DeiTForImageClassification", "levit": "LevitForImageClassification"}


def _classifier(name: str, options: dict) -> Family:
    def make(batch: int, seq: int):
        model = model_of(name, CLASSES.get(name, "AutoModelForImageClassification"), **{"num_labels": LABELS} | options)
        return model, {"pixel_values": torch.randn(batch, 3, SIZE, SIZE)} | classes(batch)

    return Family(name, "vision", make)


def _segmenter(name: str, options: dict) -> Family:
    def make(batch: int, seq: int):
        model = model_of(name, "AutoModelForSemanticSegmentation", **{"num_labels": LABELS} | options)
        labels = torch.randint(0, LABELS, (batch, SIZE, SIZE))
        return model, {"pixel_values": torch.randn(batch, 3, SIZE, SIZE), "labels": labels}

    return Family(f"{name} (segmentation)", "vision", make)


FAMILIES = [
    *(_classifier(name, options) for name, options in CLASSIFIERS.items()),
    _segmenter("segformer", CLASSIFIERS["segformer"]),
]
