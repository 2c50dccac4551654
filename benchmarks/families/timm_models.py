"""timm: the member with the fewest parameters of every module of timm 1.0.31, and small members of well-known families.

`test_*` members are a module's smallest, but have a few channels only; where a module has one, its next smallest member
stands here too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch

from families.entry import Entry, Made, image
from families.index import fraction

CONV = """
byoanet:halonet_h1 byobnet:test_byobnet byobnet:mobileone_s0 byobnet:gernet_s byobnet:repvgg_a0 byobnet:eca_resnext26ts
byobnet:seresnext26ts byobnet:resnet26t byobnet:regnetz_b16 byoanet:lambda_resnet26rpt_256 byoanet:botnet26t_256
convmixer:convmixer_768_32 convnext:test_convnext convnext:convnext_atto convnext:convnextv2_atto cpubone:cpubone_nano
cspnet:cs3darknet_focus_s cspnet:cspresnet50 cspnext:cspnext_tiny densenet:densenet121 dla:dla46x_c dla:dla34 dpn:dpn48b
dpn:dpn68 edgenext:edgenext_xx_small efficientnet:test_efficientnet efficientnet:tinynet_e efficientnet:mnasnet_small
efficientnet:mixnet_s efficientnet:efficientnet_lite0 efficientnet:efficientnet_b0 efficientnet:tf_efficientnetv2_b0
efficientnet:fbnetc_100 efficientnet:spnasnet_100 efficientnet:mobilenetv2_050 efficientnet:efficientnet_es
fasternet:fasternet_t0 focalnet:focalnet_tiny_srf ghostnet:ghostnet_050 ghostnet:ghostnetv2_100 ghostnet:ghostnetv3_050
hardcorenas:hardcorenas_b hgnet:hgnetv2_b0 hrnet:hrnet_w18_small inception_next:inception_next_atto
inception_resnet_v2:inception_resnet_v2 inception_v3:inception_v3 inception_v4:inception_v4 lcnetv2:lcnetv2_small
mambaout:test_mambaout mambaout:mambaout_femto mobilenetv3:mobilenetv3_small_050 mobilenetv3:mobilenetv3_large_100
mobilenetv3:lcnet_050 mobilenetv3:mobilenetv4_conv_small_050 nasnet:nasnetalarge nfnet:test_nfnet nfnet:nf_regnet_b0
nfnet:eca_nfnet_l0 pnasnet:pnasnet5large rdnet:rdnet_tiny regnet:regnetx_002 regnet:regnety_002 regnet:regnetv_040
repghost:repghostnet_050 repvit:repvit_m1 res2net:res2next50 res2net:res2net50_14w_8s resnest:resnest14d
resnet:test_resnet resnet:resnet10t resnet:resnet18 resnet:resnext50_32x4d resnet:seresnext26t_32x4d resnet:ecaresnet26t
resnet:resnetaa34d resnetv2:resnetv2_18 resnetv2:resnetv2_50 rexnet:rexnet_100 rexnet:rexnetr_200 selecsls:selecsls42
senet:legacy_seresnet18 senet:legacy_seresnext26_32x4d sknet:skresnet18 sknet:skresnext50_32x4d starnet:starnet_s050
tresnet:tresnet_m vgg:vgg11 vovnet:ese_vovnet19b_slim_dw xception:legacy_xception xception_aligned:xception41p
"""
ATTENTION = """
beit:beit_base_patch16_224 cait:cait_xxs24_224 coat:coat_tiny coat:coat_lite_tiny convit:convit_tiny
crossvit:crossvit_tiny_240 csatv2:csatv2 davit:davit_tiny deepseek_vit:deepseek_vit_412m deit:deit_tiny_patch16_224
deit:deit_tiny_distilled_patch16_224 efficientformer:efficientformer_l1 efficientformer_v2:efficientformerv2_s0
efficientvim:efficientvim_m1 efficientvit_mit:efficientvit_b0 efficientvit_msra:efficientvit_m0
eva:vit_tiny_patch16_dinov3_qkvb eva:eva02_tiny_patch14_224 fastvit:fastvit_t8 fastvit:fastvit_sa12 gcvit:gcvit_xxtiny
gemma4_vit:gemma4_vit_167m hiera:hiera_tiny_224 hieradet_sam2:sam2_hiera_tiny iformer:iformer_t levit:levit_128s
lowformer:lowformer_b0 maxxvit:test_coatnet maxxvit:coatnet_pico_rw_224 maxxvit:maxvit_pico_rw_256
metaformer:poolformerv2_s12 metaformer:poolformer_s12 metaformer:caformer_s18 mlp_mixer:gmlp_ti16_224
mlp_mixer:mixer_s32_224 mlp_mixer:resmlp_12_224 mobilenetv5:mobilenetv5_base mobilenetv3:mobilenetv4_hybrid_medium
mobilevit:mobilevit_xxs mobilevit:mobilevitv2_050 mvitv2:mvitv2_tiny naflexvit:naflexvit_base_patch16_parfac_gap
nest:nest_tiny nextvit:nextvit_small pit:pit_ti_224 pvt_v2:pvt_v2_b0 qwen3_vit:qwen3_vit_88m sequencer:sequencer2d_s
shvit:shvit_s1 swiftformer:swiftformer_xs swin_transformer:swin_tiny_patch4_window7_224
swin_transformer_v2:swinv2_tiny_window16_256 swin_transformer_v2_cr:swinv2_cr_tiny_224 tiny_vit:tiny_vit_5m_224
tnt:tnt_s_legacy_patch16_224 twins:twins_svt_small twins:twins_pcpvt_small visformer:visformer_tiny
vision_transformer:test_vit vision_transformer:vit_tiny_patch16_224 vision_transformer_hybrid:vit_tiny_r_s16_p8_224
vision_transformer_relpos:test_vit_relpos vision_transformer_relpos:vit_relpos_small_patch16_224
vision_transformer_sam:samvit_base_patch16_224 vitamin:vitamin_small_224 volo:volo_d1_224 xcit:xcit_nano_12_p8_224
"""
SIZES = {"halonet_h1": 256, "deepseek_vit_412m": 196}  # multiples of their blocks and patches
DEEP = 60_000_000  # parameters above which a plain transformer keeps its first blocks only
BLOCKS = 3


def entries() -> list[Entry]:
    out = []
    for family, text in (("vision conv", CONV), ("vision attention", ATTENTION)):
        for pair in text.split():
            module, name = pair.split(":")
            out.append(Entry(f"timm_{name}", family, f"timm.models.{module}:{name}", partial(make, name)))
    return out


def make(name: str, batch: int) -> Made:
    """A member with its initialization, on smaller images than its default for batches, above 256, or by the hash."""
    facts = timm.get_pretrained_cfg(name)
    default = facts.input_size[1]
    small = not facts.fixed_input_size and (default > 256 or batch > 1 or fraction(name, "image") < 0.5)
    size = SIZES.get(name) or ((192 if default > 256 else 160) if small else default)
    return Made(timm.create_model(name, **_shallow(name)), [image(3, size, size)])


def _shallow(name: str) -> dict[str, Any]:
    """Arguments that cut a large plain transformer to its first blocks."""
    with torch.device("meta"):
        if sum(p.numel() for p in timm.create_model(name).parameters()) < DEEP:
            return {}
        try:
            timm.create_model(name, depth=BLOCKS)
        except TypeError:
            return {}
    return {"depth": BLOCKS}
