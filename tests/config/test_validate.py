"""Every rule between settings: the error holds the values and a remedy; good configs pass."""

import copy
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_settings import values_of

from maxmeg.config.architectures import (
    ARCHITECTURES,
    LONGEST_SAMPLE,
    architecture,
    use_architecture,
)
from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, LossBackend
from maxmeg.config.setting import declared_problems, get, walk, with_fields
from maxmeg.config.validate import axis_sizes, resolve, validate
from maxmeg.ops.attention import call as attention
from maxmeg.ops.cross_entropy import call as cross_entropy

BOUNDED = {p: f.metadata["bounds"] for p, _, f in walk(Config()) if f.metadata["bounds"]}
ALONG = st.integers(1, 6)  # devices along an axis


def config_with(settings: dict) -> Config:
    """The default config with `settings` by dotted path."""
    return with_fields(Config(), settings)


# settings, parts of the error; on as many devices as the settings name
DELTA = "model.layers=*(gated_delta,mlp); model.delta.num_heads=8; "
HYBRID = "model.layers=*(mamba); model.mamba.num_heads=8; model.mamba.head_dim=8; "
MUP = "model.mup.base_hidden_size=8; "
LOSS_SCALE = "model.dtype=float16; optim.loss_scale."
MASKED = "data.objective=masked; data.paths=a; model.attention.causal=false; "
PAIRS = "model.bert.pooler=true; model.bert.pair_head=true; "
T5 = "data.objective=span_corruption; data.paths=a; model.position=relative; "
T5 += "model.num_layers=5; "
T5_LAYERS = "2(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
PAIRED = T5 + f"model.layers={T5_LAYERS}; "
RETRO = "data.objective=retro; data.paths=a; model.num_layers=4; model.layers="
ENCODER = "encoder_attention,encoder_cross,encoder_mlp"
CHUNKED = RETRO + f"attention,{ENCODER} encoder_norm *(chunked_cross,mlp); "
BAD = [
    (T5 + "model.layers=*(attention,cross,mlp)", "cross attention without a memory | encoder_norm"),
    ("data.objective=seq2seq; data.paths=a,b", "a model without an encoder | serves gpt"),
    (PAIRED + "model.position=rotary", "position=rotary is not supported | relative, learned"),
    (PAIRED + "model.attention.sinks=true", "attention.sinks is not supported | to false"),
    (PAIRED + "model.relative.buckets=6", "relative.buckets=6 | a multiple of 4"),
    (PAIRED + "log.sample_prompt=a", "RETRO writes no sample in training | sample_prompt="),
    (PAIRED + "data.source_length=10; parallel.tensor=4", "source_length=10 is not divisible by 4"),
    (PAIRED + "parallel.context=2; parallel.context_strategy=ring", "need every key | auto"),
    (PAIRED + "parallel.context=2; parallel.context_chunks=4", "encoder-decoder has two"),
    (T5 + "model.layers=2(encoder_attention,encoder_mlp) *(attention,cross,mlp)", "stand between"),
    (T5 + "model.layers=*(attention,cross,mlp) encoder_norm encoder_mlp", "must stand before"),
    (T5 + "model.layers=encoder_mlp encoder_norm *(attention,cross,moe)", "moe in an encoder-de"),
    (RETRO + f"*({ENCODER}) encoder_norm", "has an encoder that nothing reads"),
    (RETRO + f"chunked_cross,mlp {ENCODER} encoder_norm *(mlp)", "before the first chunked_cross"),
    (RETRO + f"{ENCODER} encoder_norm *(chunked_cross,moe)", "has moe in an | chunked_cross, mlp"),
    (CHUNKED + "data.chunk_length=48", "chunk_length=48 does not divide | =256 | 32, 64"),
    (CHUNKED + "model.retro.chunk_length=32", "retro.chunk_length=32 is not data.chunk_length=64"),
    (CHUNKED + "data.paths=a,b", "retro reads one corpus | data.paths=PREFIX"),
    (CHUNKED + "data.objective=gpt", "objective=gpt cannot train RETRO | which serves retro"),
    (PAIRED + "data.objective=retro", "objective=retro cannot train | span_corruption, seq2seq"),
    (CHUNKED + "model.position=relative", "position=relative is for encoder-decoders"),
    (CHUNKED + "parallel.context=4; parallel.fsdp=1", "=256 into 8 pieces | a multiple of 512"),
    (CHUNKED + "parallel.tensor=3; parallel.fsdp=1", "1024 tokens of a sample's neighbours"),
    ("model.position=relative", "position=relative is for encoder-decoders | rotary, learned"),
    (PAIRED + "data.objective=seq2seq; data.paths=", "data.paths=SOURCE,TARGET"),
    ("data.source_length=8", "source_length=8 has no effect without | objective=span_corruption"),
    (MASKED + "model.layers=*(conv,mlp attention,mlp)", "mixer conv, which is causal"),
    (MASKED + "model.attention.causal=true", "masked cannot | causal=true, which serves gpt, sft"),
    (MASKED + "model.mtp.num_layers=1", "mtp.num_layers=1 predicts later | set it to 0"),
    (MASKED + "log.sample_prompt=a", 'does not continue text | sample_prompt=""'),
    (MASKED + "data.packing=greedy", "packing=greedy | objective=masked"),
    (MASKED + "data.order=native", "order=native | set order=megatron"),
    ("data.objective=preferences; data.paths=a.jsonl", "preferences cannot be trained yet"),
    ("data.objective=preferences; data.order=native", "set order=megatron | needs chats"),
    (
        "data.objective=image_text; data.image_size=3",
        "image_size=3 must be | set data.paths=PREFIX",
    ),
    ("data.image_token=<i>", "image_token=<i> has no effect without data.objective=image_text"),
    (MASKED + "data.paths=", "needs a corpus of sentences | data.paths=PREFIX"),
    (MASKED + "data.eod_mask_loss=true", "eod_mask_loss=True | leave it out"),
    (MASKED + "data.sentence_pairs=true", "pair_head=false with | sentence_pairs=true | alike"),
    (MASKED + PAIRS + "data.sentence_pairs=true; model.bert.token_types=1", "two types | to 2"),
    (MASKED + "model.bert.pair_head=true", "reads the pooler's output | pooler=true"),
    (MASKED + "model.bert.position_offset=2", "position_offset=2 needs model.position=learned"),
    (
        MASKED + "model.position=learned; model.bert.position_offset=2; model.max_position=256",
        "sequence_length=256 is longer than the 254 tokens | max_position=256",
    ),
    ("data.sentence_pairs=true", "sentence_pairs=True has no effect without | objective=masked"),
    ("model.attention.num_heads=5", "hidden_size=128 | num_heads=5 | 1, 2, 4, 8 | .head_dim"),
    ("model.attention.num_heads=0", "num_heads=0 | choose num_heads in 1, 2, 4"),
    ("model.attention.num_kv_heads=3", "num_heads=4 | num_kv_heads=3 | in 1, 2, 4"),
    ("model.attention.num_kv_heads=-1", "num_kv_heads=-1 | in 1, 2, 4"),
    ("model.rotary.fraction=0.01", "rotary.fraction=0.01 | head size 32 | raise it"),
    ("model.parallel_norms=true", "parallel_norms=true needs | *(attention+mlp)"),
    ("model.recompute=selective,atention_lse", "'atention_lse' is | nearest are attention_lse"),
    (
        "model.parallel_norms=true; model.layers=*(attention+mlp); model.norm_place=post",
        "parallel_norms=true has no effect with norm_place=post",
    ),
    ("model.layers=*(local,mlp)", "attention.window=0 must be at least 1 | local"),
    (
        "model.layers=*(local,mlp); model.attention.window=4; model.attention.chunk=4",
        "window=4 and model.attention.chunk=4 exclude each other",
    ),
    (
        "model.layers=*(local,mlp); model.attention.chunk=4; model.attention.local_kv_heads=3",
        "num_heads=4 is not divisible by model.attention.local_kv_heads=3: choose it in 1, 2, 4",
    ),
    ("model.attention.local_head_dim=8", "local_head_dim=8: no layer | local"),
    ("model.layer_embedding.size=8", "layer_embedding.size=8: no layer | mixer layer_embedding"),
    (
        "model.layers=local,mlp *(shared_attention,mlp); model.attention.window=4",
        "has no attention before the first shared_attention | put one before it",
    ),
    (
        "model.layers=attention,mlp *(shared_attention,mlp); model.mtp.num_layers=1",
        "model.mtp.layers='': an MTP layer cannot have shared_attention | set it to attention,mlp",
    ),
    (
        "model.layers=*(attention,mlp,layer_embedding); model.layer_embedding.size=9; "
        "parallel.fsdp=2",
        "model.layer_embedding.size=9 is not divisible by parallel.fsdp=2: choose fsdp in 1, 3",
    ),
    (
        "model.layers=attention,mlp *(shared_attention,mlp); optim.qk_clip.threshold=100.0",
        "optim.qk_clip.threshold=100.0 cannot scale the keys that shared_attention | set it to 0",
    ),
    ("model.residual_scale=0.5; model.norm_place=sandwich", "has no effect | set it to 1"),
    (
        "model.layers=*(mla,mlp); model.attention.value_norm=true; model.attention.num_heads=4",
        "value_norm=True does not apply to multi-latent attention (mixer mla): leave it out",
    ),
    ("model.rotary.local_base=10000.0", "rotary.local_base=10000.0: no layer | local"),
    ("model.conv.bias=true", "model.conv.bias=True: no layer | the mixer conv"),
    ("model.mamba.norm=false", "model.mamba.norm=False: no layer | the mixer mamba"),
    (HYBRID + "model.mamba.num_groups=3", "num_groups=3 does not divide the 8 heads"),
    (HYBRID + "model.mamba.chunk=96", "model.mamba.chunk=96 must be a power of 2 | 64, 128"),
    (HYBRID + "model.mamba.scales=1.0,2.0", "must be 5 factors"),
    (HYBRID + "model.mamba.max_step=0.1; model.mamba.min_step=0.2", "smaller than min_step=0.2"),
    (DELTA + "model.delta.num_key_heads=3", "num_key_heads=3 does not divide the 8 heads"),
    (DELTA + "model.delta.chunk=48", "model.delta.chunk=48 must be a power of 2 | 32, 64"),
    (DELTA + "parallel.tensor=16", "model.delta.num_heads=8 is not divisible | 1, 2, 4, 8"),
    (HYBRID + "parallel.tensor=16", "model.mamba.num_heads=8 is not divisible | 1, 2, 4, 8"),
    (HYBRID + "model.mamba.num_heads=0; model.mamba.head_dim=60", "60 does not divide 2 x | =256"),
    ("model.layers=*(conv,mlp); model.hidden_size=132; parallel.tensor=8", "132 is not | tensor=8"),
    ("model.attention.window=8", "attention.window=8: no layer | the mixer local"),
    ("model.moe.top_k=3; model.moe.z_loss=0.1", "moe.top_k=3, model.moe.z_loss=0.1: no"),
    ("model.layers=*-*-|*-*-|; model.num_layers=8; parallel.pipe=2", "3 pipeline chunks | are 2"),
    ("lora.rank=8; lora.targets=", "lora.targets is empty | query,value"),
    ("lora.alpha=32.0", "lora.alpha=32.0 has no effect without lora.rank: set that"),
    ("model.rotary.factor=2.0", "model.rotary.factor=2.0 has no effect without | linear or"),
    ("model.rotary.scaling=linear; model.position=learned", "linear has no effect | =rotary"),
    ("model.rotary.scaling=linear; model.rotary.low=2.0", "low=2.0 has no effect without | llama3"),
    ("model.rotary.scaling=llama3; model.rotary.factor=8.0", "original_length=0 | at least 2"),
    (
        "model.rotary.scaling=yarn; model.rotary.original_length=64; model.rotary.low=40.0",
        "rotary.low=40.0 | high=4.0 | 0 < low < high",
    ),
    (
        "model.rotary.scaling=longrope; model.rotary.original_length=64; "
        "model.rotary.short_factors=1.0",
        "rotary.short_factors must be 16 positive numbers | are 1 | rotary.long_factors",
    ),
    ("parallel.pipe=2; model.scan_layers=false", "scan_layers=false | pipe=2"),
    ("parallel.lanes=together", "parallel.lanes=together | one | micro_batch_size | lanes=apart"),
    (
        "parallel.fsdp_gather=step; parallel.zero1=false",
        "fsdp_gather=step | zero1=true | microbatch",
    ),
    (
        "parallel.fsdp_gather=step; parallel.fsdp_context=true; parallel.context=2",
        "fsdp_gather=step | fsdp_context=false | microbatch",
    ),
    ("parallel.tensor=8", "model.attention.num_heads=4 | parallel.tensor=8 | tensor in 1, 2, 4"),
    (
        "model.hidden_size=96; model.attention.num_heads=12; model.attention.num_kv_heads=6; "
        "parallel.tensor=4",
        "num_kv_heads=6 is neither | parallel.tensor=4 | tensor in 1, 2, 3, 6, or change",
    ),
    ("model.mlp.ffn_size=130; parallel.tensor=4", "ffn_size=130 | tensor=4 | in 1, 2, 5"),
    ("parallel.fsdp=3; train.global_batch_size=3", "hidden_size=128 | fsdp=3 | in 1, 2, 4"),
    ("train.global_batch_size=0", "global_batch_size=0 | nearest choices are 1"),
    (
        "train.global_batch_size=24; train.micro_batch_size=5; parallel.data=2",
        "=24 | divisible by 10 = data 2 | micro_batch_size 5 | 20 and 30",
    ),
    ("model.max_position=128", "sequence_length=256 | max_position=128 | shorten | raise"),
    ("optim.min_lr=1.0", "optim.min_lr=1.0 | [0, optim.lr=0.0003]"),
    ("optim.warmup_init_lr=-0.1", "optim.warmup_init_lr=-0.1 | [0, optim.lr=0.0003]"),
    ("train.score_scaling=true", "score_scaling=true | objective=ict, retrieve | leave it out"),
    ("optim.warmup_steps=5; optim.warmup_samples=6", "steps=5 | samples=6 | one of the two"),
    ("optim.decay=wsd", "decay=wsd | wsd_decay_steps=0 | wsd needs a length"),
    ("optim.wsd_decay_steps=3", "wsd_decay_steps=3 | no other shape"),
    ("optim.weight_decay_end=0.5", "weight_decay_end=0.5 | choose a ramp"),
    ("optim.weight_decay_ramp=linear", "ramp=linear | together with an end"),
    ("optim.optimizer=muon; optim.lr=0.0", "lr=0.0 | muon | > 0"),
    ("optim.muon.nesterov=true", "nesterov | optimizer=muon"),
    (
        "optim.optimizer=muon; optim.muon.coefficients=cubic; optim.muon.steps=4",
        "steps=4 | cubic | set it to 5",
    ),
    ("optim.masters=remainders; model.dtype=float32", "masters=remainders | dtype=bfloat16"),
    ("optim.optimizer=adafactor; optim.moments=float8", "moments=float8 | .momentum=0.0 | above 0"),
    ("optim.ema.decay=1.0", "optim.ema.decay=1.0 | below 1"),
    ("optim.ema.decay=-0.5", "optim.ema.decay=-0.5 | at least 0"),
    ("optim.ema.validate=false", "validate | without optim.ema.decay"),
    ("model.mup.base_hidden_size=-1", "base_hidden_size=-1 | at least 0"),
    ("model.mup.base_head_dim=8", "base_head_dim=8 | without model.mup.base_hidden_size"),
    (MUP + "model.mup.base_head_dim=8; model.layers=*(conv,mlp)", "base_head_dim=8: no layer of"),
    (MUP + "model.bert.pooler=true", "base_hidden_size=8 has no rule | model.bert"),
    (MUP + "optim.optimizer=soap", "optim.optimizer=soap | muP has rules for the rates"),
    (
        "model.mup.base_hidden_size=8; optim.optimizer=adafactor; "
        "optim.adafactor.scale_by_parameter=true",
        "scale_by_parameter=true | muP has rules for the rates of adamw",
    ),
    ("model.recompute=offload:mlp", "'offload:mlp' is neither | mlp_up"),
    ("optim.groups=('embedding.*:fast:0',)", "embedding.*:fast:0 | PATTERN:RATE:DECAY"),
    ("optim.groups=('embedding.*:nan:0',)", "embedding.*:nan:0 | finite factors >= 0"),
    ("optim.soap.kl=false", "kl | optimizer=soap"),
    ("optim.momentum=0.5", "momentum=0.5 has no effect without optim.optimizer=sgd: set that"),
    ("optim.optimizer=adafactor; optim.beta2=0.9", "beta2=0.9 has no effect | lion or soap"),
    ("optim.optimizer=lion; optim.eps=1e-6", "eps=1e-06 has no effect without | muon or soap"),
    ("optim.wsd_decay=linear", "wsd_decay=linear has no effect without optim.decay=wsd"),
    (LOSS_SCALE + "initial=1e39", "1e+39 must be | below 1e+38"),
    ("optim.loss_scale.fixed=1024.0", "dtype=bfloat16 | model.dtype=float16 | defaults"),
    ("model.dtype=float16; train.rerun_bad_steps=true", "rerun_bad_steps | overflow | bfloat16"),
    (LOSS_SCALE + "initial=1.0; optim.loss_scale.minimum=2.0", "minimum=2.0 exceeds | initial=1.0"),
    (LOSS_SCALE + "fixed=8.0; optim.loss_scale.window=9", "window=9 has no effect | fixed=0.0"),
]
BAD_ON_8_DEVICES = [
    ("parallel.tensor=3", "tensor=3 | there are 8 | product | fsdp=0"),
    ("parallel.data=4; parallel.fsdp=1", "data=4 | there are 8 | product"),
    ("parallel.fsdp=1", "mesh of size 1 | there are 8 | product"),
    ("parallel.data=0", "parallel.data=0 | at least 1"),
    ("parallel.fsdp=-1", "parallel.fsdp=-1 | at least 1"),
    ("train.global_batch_size=30", "=30 | divisible by 8 | fsdp 8 | 24 and 32"),
]


@pytest.mark.parametrize(("settings", "fragments"), BAD + BAD_ON_8_DEVICES)
def test_bad_settings_name_values_and_remedy(settings, fragments):
    config = config_with(values_of(settings))
    num_devices = 8 if (settings, fragments) in BAD_ON_8_DEVICES else config.parallel.devices
    with pytest.raises(ValueError) as error:
        validate(config, num_devices)
    missing = [part for part in fragments.split(" | ") if part not in str(error.value)]
    assert not missing, str(error.value)


@pytest.mark.parametrize("path", BOUNDED)
def test_values_outside_declared_bounds_are_refused(path):
    steps = {"at_least": -1, "above": 0, "at_most": 1, "below": 0}
    with pytest.raises(TypeError, match=f"{path.split('.')[-1]}=nan .float.: expected a"):
        config_with({path: math.nan})
    for value in (limit + steps[name] for name, limit in BOUNDED[path].items()):
        config = config_with({path: value})
        start = f"{path}={get(config, path)} must be "
        assert [p for p in declared_problems(config) if p.startswith(start)], value


def test_a_setting_is_checked_where_it_is_set():
    config = Config()
    for section, name, value, error in [
        (config.optim, "learning_rate", 3, "OptimConfig has no field 'learning_rate': did you"),
        (config.optim, "lr", "fast", "lr='fast' .str.: expected a finite number"),
        (config.train, "num_steps", 1.5, "num_steps=1.5 .float.: expected a whole number"),
        (config.model, "dtype", "bfloat", "expected one of float32, .*did you mean bfloat16"),
        (config, "model", None, "model=None is no ModelConfig"),
    ]:
        with pytest.raises((AttributeError, TypeError), match=error):
            setattr(section, name, value)
    assert repr(config) == "Config()"
    config.run_dir, config.data.paths = Path("a"), ["b", "c"]
    config.optim.lr, config.model.dtype, config.seed = np.float32(0.5), "float16", np.int64(3)
    shown = "run_dir='a', seed=3, model.dtype=float16, data.paths=b,c, optim.lr=0.5"
    assert " ".join(repr(config).split()) == f"Config( {shown})"
    assert type(config.seed) is int and config == copy.deepcopy(config)


def test_every_broken_rule_is_listed_at_once():
    settings = {
        "model.attention.num_kv_heads": 3,
        "optim.min_lr": 1.0,
        "train.global_batch_size": 7,
    }
    with pytest.raises(ValueError) as error:
        validate(config_with(settings), 2)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    for path in settings:
        assert any(f"{path}={settings[path]}" in line for line in lines), path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_named_architectures_are_valid(name):
    config = use_architecture(Config(), name)
    model = config.model
    longest = min(model.max_position - model.bert.position_offset, LONGEST_SAMPLE)
    assert config.data.sequence_length == longest
    if not model.attention.causal or model.has_source:
        config.data.paths = ("sentences",)
    for num_devices in (1, 2, 4, 8):
        validate(config, num_devices)


def test_an_unknown_architecture_names_the_three_nearest():
    near = "llama3-8b, llama3.1-8b or llama2-7b"
    with pytest.raises(ValueError, match=rf"'llama4-8b': did you mean {near}\?.*`maxmeg models`"):
        architecture("llama4-8b")


@given(
    others=st.fixed_dictionaries(dict.fromkeys(("pipe", "data", "expert", "tensor"), ALONG)),
    fsdp=st.integers(0, 6),
    share=st.integers(0, 6),
    more=st.integers(0, 1),
)
def test_a_mesh_fits_or_says_why(others, fsdp, share, more):
    parallel, size = ParallelConfig(fsdp=fsdp, **others), math.prod(others.values())
    count = size * share + more
    if count % size == 0 and fsdp in (0, count // size):
        wanted = {**others, "context": 1, "fsdp": count // size}
        assert axis_sizes(parallel, count) == wanted
    else:
        with pytest.raises(ValueError, match=rf"needs \d+ devices.*there are {count}"):
            axis_sizes(parallel, count)


@pytest.mark.parametrize(
    ("sizes", "expert_axis", "fold"),
    [
        ({"tensor": 4, "expert": 8}, 8, 1),
        ({"tensor": 4, "expert": 8, "expert_tensor": 4}, 8, 1),
        ({"tensor": 4, "expert": 8, "expert_tensor": 2}, 4, 2),
        ({"tensor": 4, "expert": 8, "expert_tensor": 1}, 2, 4),
        ({"tensor": 2, "context": 2, "expert": 4, "expert_tensor": 1}, 1, 2),
        ({"tensor": 2, "context": 2, "expert": 4}, 2, 1),
        ({"expert": 4, "expert_tensor": 1}, 4, 1),
    ],
)
def test_experts_lie_along_tensor_and_context_first(sizes, expert_axis, fold):
    parallel = ParallelConfig(**sizes, fsdp=2)
    assert parallel.fold == fold and parallel.expert_axis == expert_axis
    others = parallel.tensor * parallel.context * 2
    assert parallel.devices == others * expert_axis
    assert axis_sizes(parallel, parallel.devices)["expert"] == expert_axis


# model.vocab_size, model.max_position -> after resolve with a tokenizer of 300, length 256
RESOLVED = {(0, 0): (300, 256), (512, 0): (512, 256), (0, 64): (300, 64), (300, 1024): (300, 1024)}


@pytest.mark.parametrize(("before", "after"), RESOLVED.items(), ids=str)
def test_resolve_fills_in_only_what_is_open(before, after):
    config = config_with({"model.vocab_size": before[0], "model.max_position": before[1]})
    for _ in range(2):  # a resolved config, saved and run again, stays as it is
        resolve(config, tokenizer_vocab_size=300)
        assert (config.model.vocab_size, config.model.max_position) == after


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    config = config_with({"model.vocab_size": 256})
    with pytest.raises(
        ValueError, match="vocab_size=256 is smaller than the tokenizer's 300: raise"
    ):
        resolve(config, tokenizer_vocab_size=300)
    resolve(config, tokenizer_vocab_size=300, required_size=256)  # the rest are added tokens


def test_the_padded_vocabulary_divides_for_every_tensor_size():
    for vocab_size, tensor in itertools.product((1, 127, 128, 50257, 128256), (1, 2, 3, 8)):
        config = config_with({"model.vocab_size": vocab_size})
        padded = config.model.padded_vocab_size(tensor)
        assert padded % (128 * tensor) == 0 and 0 <= padded - vocab_size < 128 * tensor
    assert architecture("gpt2-124m").padded_vocab_size(1) == 50304  # Megatron-LM's number


def test_backends_that_a_config_can_name_are_those_of_the_ops():
    assert {b.value for b in AttentionBackend} == {"auto", *attention.BACKENDS}
    assert {b.value for b in LossBackend} == {"auto", *cross_entropy.BACKENDS}
