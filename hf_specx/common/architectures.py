"""The layouts in which each architecture was shown to be exact on transformers 5.24, by tests/generate/test_sweep.py.

Types of vision-language models were run with and without images, by tests/models/test_vision.py or by hand. Names are
`model_type` of a config; `python scripts/architectures.py --discover` tries every layout and prints them anew.
"""

from transformers.generation.utils import ALL_CACHE_NAMES


CACHE = ALL_CACHE_NAMES[0]  # by which argument a model is given its cache: "cache" from 5.24 on, then Mamba too
GROUPS = {
    "ragged padded packed lockstep": """
        afmoe apertus arcee aria_text audioflamingo3 axk1 beam bert bert-generation big_bird biogpt bitnet camembert
        codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3
        diffllama doge dots1 electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint
        fun_asr_nano fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified
        gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glmasr got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox
        gpt_neox_japanese gpt_oss gptj granite granite_speech granite_speech_plus granite_swa granitemoe granitemoe_swa
        granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2
        jetmoe kolibri1 laguna llama llama4 llama4_text longcat_flash megatron-bert mellum mimo_v2_flash minicpm3
        minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder musicflamingo nanochat nemotron olmo olmo2
        olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_audio qwen2_moe qwen3 qwen3_asr qwen3_moe
        rembert roberta roberta-prelayernorm roc_bert seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
        voxtral xglm xlm-roberta xlm-roberta-xl xmod youtu
    """,
    "ragged padded lockstep": """
        aria aya_vision cohere2_vision cohere_compass cosmos3_omni deepseek_vl deepseek_vl_hybrid ernie4_5_vl_moe
        glm46v glm4v glm4v_moe glm_ocr glmga granite_docling hunyuan_vl idefics2 idefics3 internvl janus kimi_k25
        lighton_ocr llava llava_next llava_next_video llava_onevision mistral3 mistral4 mpt muse_glimmer ovis2
        paddleocr_vl pp_chart2table qianfan_ocr qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm
        video_llama_3 video_llava vipllava
    """,
    "padded lockstep": """
        bart bigbird_pegasus blenderbot blenderbot-small bloom canary cohere_asr encoder-decoder gpt_neo kosmos-2.5
        longt5 m2m_100 marian mbart moonshine moonshine_streaming moss_transcribe_diarize mt5 mvp nllb-moe paligemma
        pegasus pegasus_x plbart pop2piano seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5
        switch_transformers t5 t5gemma t5gemma2 umt5 vibevoice_asr whisper
    """,
    "lockstep": """
        axk2 bailing_hybrid bamba deepseek_v32 dots3_note dots3_note_text falcon_h1 glm_moe_dsa granitemoehybrid hy_v4
        inkling2_text inkling_text kimi_linear led lfm2 lfm2_moe lfm3 mamba2 minimax mllama mllama_text_model
        nemo_speechlm nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
        qwen4_exp_text roformer zamba2 zaya
    """,
    "ragged": """
        moshi
    """,
}
LAYOUTS_OF = {name: tuple(layouts.split()) for layouts, names in GROUPS.items() for name in names.split()}
UNKNOWN = ("ragged", "padded", "lockstep")  # for a type that is not in the table: the first that is measured right
WITHOUT_CACHE = ("fsmt", "openai-gpt")  # they have none, or are exact only without: there is nothing to roll back
WINDOW_IN_CACHE = ("moshi",)  # has its window only by what its cache drops, so prompts are computed without a window
UNMASKED_STEPS = ("led",)  # applies the mask of its text where it is fed several tokens, but not in single steps
NO_TREES = ("mpt",)  # its attention goes by distances of slots, and candidates at one position have several
# their config has a number of positions, but these are computed, or they have none: texts may be longer
ANY_POSITION = """
    fsmt inkling2_text inkling_text jamba kimi_linear m2m_100 nemo_speechlm nemotron_h nllb-moe pegasus_x rwkv
    seamless_m4t seamless_m4t_v2 xglm xlnet zamba
""".split()  # noqa: SIM905
ASK_FOR_MASKS = ("big_bird", "gpt2", "megatron-bert", "rembert")  # warn if no mask is given and a pad is fed
BY_MASK = ("ragged", "packed")  # layouts that need an attention which takes a 4D mask
MASKED = ("sdpa", "eager")

# Encoders that decode too: they do so causally only where their config says is_decoder=True
ENCODERS = """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
""".split()  # noqa: SIM905
_STEPS = "its forward of several tokens after cached ones gives other logits than single steps do"
_OWN_CACHE = "it keeps its past in a structure of its own, which cannot be taken back"
# As targets; as drafts they are as good as any, since their candidates are judged by the distribution that they gave
INEXACT = dict.fromkeys(["mamba", "falcon_mamba", "jamba", "zamba"], _STEPS) | {
    "cpmant": "it takes every token with id 0 for a pad, candidates among them",
    "xlm": "its preparation puts a mask token after the text, which several tokens cannot share",
    "minimax_m3_vl_text": "its blocks of keys are aligned with padded columns",
}
# Exact on transformers 5.23, not shown to be so on 5.17: there our text differs, or that of `generate` does
SINCE = (5, 23)
LATER = """
    big_bird doge encoder-decoder ernie4_5_moe fsmt led megatron-bert nllb-moe qwen4_exp qwen4_exp_text rembert
    roformer seamless_m4t seamless_m4t_v2 speech-encoder-decoder
""".split()  # noqa: SIM905
REFUSED = {
    "rwkv": _OWN_CACHE,
    "recurrent_gemma": _OWN_CACHE,
    "deepseek_v4": "it keeps compressed keys besides its cache, which cannot be taken back",
    "xlstm": _OWN_CACHE,
    "xlnet": _OWN_CACHE,
    "reformer": _OWN_CACHE,
    "prophetnet": "its cache takes one token at a time",
    "voxtral_realtime": "each of its tokens is read with the next piece of sound",
    "kyutai_speech_to_text": "it reads codes of sound besides the text, which are not candidates",
    "blt": "its patches depend on the bytes that follow, candidates among them",
} | dict.fromkeys(WITHOUT_CACHE, "it is exact without a cache only")
