"""Caffe's messages for protobuf: the fields of caffe.proto that reading a net takes, by number.

`NET` is the class of NetParameter. The text of a field is `name=number:type`, then `*` where it is repeated and
`=value` where it has a default. Types in braces are enums whose values count from 0, or have their numbers.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

WINDOW = "kernel_h={}:uint64 kernel_w={}:uint64 stride_h={}:uint64 stride_w={}:uint64 pad_h={}:uint64 pad_w={}:uint64 "
V1_TYPES = (
    "NONE=0,ACCURACY=1,BNLL=2,CONCAT=3,CONVOLUTION=4,DATA=5,DROPOUT=6,EUCLIDEAN_LOSS=7,FLATTEN=8,HDF5_DATA=9,"
    "HDF5_OUTPUT=10,IM2COL=11,IMAGE_DATA=12,INFOGAIN_LOSS=13,INNER_PRODUCT=14,LRN=15,MULTINOMIAL_LOGISTIC_LOSS=16,"
    "POOLING=17,RELU=18,SIGMOID=19,SOFTMAX=20,SOFTMAX_LOSS=21,SPLIT=22,TANH=23,WINDOW_DATA=24,ELTWISE=25,POWER=26,"
    "SIGMOID_CROSS_ENTROPY_LOSS=27,HINGE_LOSS=28,MEMORY_DATA=29,ARGMAX=30,THRESHOLD=31,DUMMY_DATA=32,SLICE=33,MVN=34,"
    "ABSVAL=35,SILENCE=36,CONTRASTIVE_LOSS=37,EXP=38,DECONVOLUTION=39"
)
PHASE = "{TRAIN,TEST}"
MESSAGES = {
    "BlobShape": "dim=1:int64*",
    "BlobProto": "num=1:int64 channels=2:int64 height=3:int64 width=4:int64 data=5:float* shape=7:BlobShape "
    "double_data=8:double*",
    "NetState": f"phase=1:{PHASE} level=2:int64 stage=3:string*",
    "NetStateRule": f"phase=1:{PHASE} min_level=2:int64 max_level=3:int64 stage=4:string* not_stage=5:string*",
    "ParamSpec": "name=1:string lr_mult=3:float=1 decay_mult=4:float=1",
    "BatchNormParameter": "use_global_stats=1:bool moving_average_fraction=2:float=0.999 eps=3:float=1e-5",
    "BiasParameter": "axis=1:int64=1 num_axes=2:int64=1",
    "ConcatParameter": "concat_dim=1:uint64=1 axis=2:int64=1",
    "ConvolutionParameter": WINDOW.format(11, 12, 13, 14, 9, 10)
    + "num_output=1:uint64 bias_term=2:bool=true pad=3:uint64* kernel_size=4:uint64* group=5:uint64=1 "
    "stride=6:uint64* axis=16:int64=1 dilation=18:uint64*",
    "CropParameter": "axis=1:int32=2 offset=2:uint32*",
    "DropoutParameter": "dropout_ratio=1:float=0.5 scale_train=2:bool=true",
    "EltwiseParameter": "operation=1:{PROD,SUM,MAX}=SUM coeff=2:float*",
    "ELUParameter": "alpha=1:float=1",
    "ExpParameter": "base=1:float=-1 scale=2:float=1 shift=3:float=0",
    "FlattenParameter": "axis=1:int64=1 end_axis=2:int64=-1",
    "InnerProductParameter": "num_output=1:uint64 bias_term=2:bool=true axis=5:int64=1 transpose=6:bool=false",
    "InputParameter": "shape=1:BlobShape*",
    "LRNParameter": "local_size=1:uint64=5 alpha=2:float=1 beta=3:float=0.75 "
    "norm_region=4:{ACROSS_CHANNELS,WITHIN_CHANNEL} k=5:float=1",
    "MVNParameter": "normalize_variance=1:bool=true across_channels=2:bool=false eps=3:float=1e-9",
    "PermuteParameter": "order=1:uint32*",
    "PoolingParameter": WINDOW.format(5, 6, 7, 8, 9, 10)
    + "pool=1:{MAX,AVE,STOCHASTIC} kernel_size=2:uint64* stride=3:uint64* pad=4:uint64* global_pooling=12:bool=false",
    "PowerParameter": "power=1:float=1 scale=2:float=1 shift=3:float=0",
    "PReLUParameter": "channel_shared=2:bool=false",
    "ReLUParameter": "negative_slope=1:float=0",
    "ReshapeParameter": "shape=1:BlobShape axis=2:int64=0 num_axes=3:int64=-1",
    "ScaleParameter": "axis=1:int64=1 num_axes=2:int64=1 bias_term=4:bool=false",
    "SliceParameter": "slice_dim=1:uint64=1 slice_point=2:uint64* axis=3:int64=1",
    "SoftmaxParameter": "axis=2:int64=1",
    "LayerParameter": "name=1:string type=2:string bottom=3:string* top=4:string* param=6:ParamSpec* "
    f"blobs=7:BlobProto* include=8:NetStateRule* exclude=9:NetStateRule* phase=10:{PHASE} "
    "concat_param=104:ConcatParameter convolution_param=106:ConvolutionParameter dropout_param=108:DropoutParameter "
    "eltwise_param=110:EltwiseParameter "
    "exp_param=111:ExpParameter inner_product_param=117:InnerProductParameter lrn_param=118:LRNParameter "
    "mvn_param=120:MVNParameter pooling_param=121:PoolingParameter power_param=122:PowerParameter "
    "relu_param=123:ReLUParameter softmax_param=125:SoftmaxParameter slice_param=126:SliceParameter "
    "prelu_param=131:PReLUParameter reshape_param=133:ReshapeParameter log_param=134:ExpParameter "
    "flatten_param=135:FlattenParameter batch_norm_param=139:BatchNormParameter elu_param=140:ELUParameter "
    "bias_param=141:BiasParameter scale_param=142:ScaleParameter input_param=143:InputParameter "
    "crop_param=144:CropParameter permute_param=202:PermuteParameter",
    "V0LayerParameter": "name=1:string",
    "V1LayerParameter": "layer=1:V0LayerParameter bottom=2:string* top=3:string* name=4:string "
    f"type=5:{{{V1_TYPES}}} blobs=6:BlobProto* concat_param=9:ConcatParameter "
    "convolution_param=10:ConvolutionParameter dropout_param=12:DropoutParameter "
    "inner_product_param=17:InnerProductParameter lrn_param=18:LRNParameter pooling_param=19:PoolingParameter "
    "power_param=21:PowerParameter eltwise_param=24:EltwiseParameter relu_param=30:ReLUParameter "
    "slice_param=31:SliceParameter include=32:NetStateRule* exclude=33:NetStateRule* mvn_param=34:MVNParameter "
    "softmax_param=39:SoftmaxParameter exp_param=41:ExpParameter param=1001:string*",
    "NetParameter": "name=1:string layers=2:V1LayerParameter* input=3:string* input_dim=4:int64* state=6:NetState "
    "input_shape=8:BlobShape* layer=100:LayerParameter*",
}
FIELD = re.compile(r"(\w+)=(\d+):(\{[^}]*\}|\w+)(\*?)(?:=(\S+))?")
Proto = descriptor_pb2.FieldDescriptorProto


def _file() -> descriptor_pb2.FileDescriptorProto:
    made = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
    for name, fields in MESSAGES.items():
        message = made.message_type.add(name=name)
        for field, number, kind, many, default in FIELD.findall(fields):
            label = Proto.LABEL_REPEATED if many else Proto.LABEL_OPTIONAL
            f = message.field.add(name=field, number=int(number), label=label)
            if default:
                f.default_value = default
            if kind.startswith("{"):
                enum = message.enum_type.add(name=f"Of_{field}")
                for k, word in enumerate(kind[1:-1].split(",")):
                    value, _, at = word.partition("=")
                    enum.value.add(name=value, number=int(at or k))
                f.type, f.type_name = Proto.TYPE_ENUM, f".caffe.{name}.{enum.name}"
            elif kind in MESSAGES:
                f.type, f.type_name = Proto.TYPE_MESSAGE, f".caffe.{kind}"
            else:
                f.type = getattr(Proto, f"TYPE_{kind.upper()}")
                f.options.packed = bool(many) and kind in ("float", "double")
    return made


def _class(name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())  # a pool of its own: Caffe itself may be loaded
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"caffe.{name}"))


NET = _class("NetParameter")
