"""Where the types of tests/zoo.py need something else than the generic shrinking: by the model type of a config."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA4 = {"global_head_dim": 16}
SHARED_KV = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
SHARED_KV |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
ASSISTANT = {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
EXPERTS = {"num_experts": 4, "num_local_experts": 4}
HYBRID = {"layer_types": ["full_attention", "sliding_attention"]}
CODEC = {"depths": [1] * 7, "num_filters": 2}
CONVOLUTIONS = {"conv_dim": [16] * 7}
CROSSING = {"decoder": {"is_decoder": True, "add_cross_attention": True}}
EOS = {"eos_token_id": 95}  # where a config must have one

# Arguments that replace the shrunk ones, in a config of that type wherever it stands
CONFIGS: dict[str, dict] = {
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["sparse", "dense"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "bailing_hybrid": EXPERTS | {"num_experts_per_token": 2, "num_expert_group": 1},
    "kimi_linear": EXPERTS | {"num_experts_per_token": 2},
    "kolibri1": EXPERTS,
    "mellum": EXPERTS | HYBRID,
    "qwen3_moe": EXPERTS,
    "laguna": HYBRID | {"num_attention_heads_per_layer": [4, 8]},
    "llama4_text": {"moe_layers": [1]},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "longcat_flash": {"zero_expert_num": 2},
    "vibevoice_acoustic_tokenizer": CODEC,
    "vibevoice_acoustic_tokenizer_encoder": CODEC,
    "speecht5": CONVOLUTIONS,
    "wav2vec2": CONVOLUTIONS,
    "kyutai_speech_to_text": {"num_codebooks": 4, "codebook_vocab_size": 33, "audio_bos_token_id": 32}
    | {"codec_config": {"num_quantizers": 4, "codebook_size": 32, "num_filters": 2}},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE | {"mrope_section": [2, 1, 1]}, "full_attention": None},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_text": {f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")}
    | {f"swa_{name}": 8 for name in ("v_head_dim", "qk_nope_head_dim")}
    | {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16, "head_dim": 16},
    "encoder-decoder": CROSSING,
    "speech-encoder-decoder": CROSSING,
    "falcon_h1": {"mamba_d_ssm": 64},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": SHARED_KV | {"intermediate_size": 64, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gemma4_unified_assistant": ASSISTANT,
    "nemotron": {"num_key_value_heads": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hrm_text": {"num_layers_per_stack": None, "H_cycles": 1, "L_cycles": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "pop2piano": {"composer_vocab_size": 1},
    "whisper": {"max_source_positions": 16},
    "qwen3_asr": EOS,
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4}
    | {"indexer_compress_ratio": 2, "ple_layer_ids": [1]}
    | {"ple_embed_dim": 32, "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 1}
    | {"make_ngram_vocab_size_divisible_by": 8}
    | EOS,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8}
    | {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "hash_seed": 0},
    "rwkv": {"attention_hidden_size": 32},
    "vibevoice": EOS,
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
}
# Arguments without which the default config is refused
DEFAULTS: dict[str, dict] = {"gemma4_assistant": ASSISTANT, "gemma4_unified_assistant": ASSISTANT}
# Arguments of the generation config
GENERATION: dict[str, dict] = {
    "musicgen": {"decoder_start_token_id": 2},
    "musicgen_melody": {"decoder_start_token_id": 2},
    "pop2piano": {"composer_to_feature_token": {"composer1": 0}},
}
# Gain and width of random weights where the usual ones make greedy texts repeat a token, by kind
SCALES: dict[tuple, str] = {
    ("causal", 0.4, 1): "bloom nanochat persimmon",
    ("causal", 0.6, 1): "bart bert big_bird cpmant ctrl data2vec-text electra ernie git got_ocr2 gpt_neox gptj mvp "
    "nemotron plbart rembert roberta roberta-prelayernorm roc_bert trocr xmod",
    ("causal", 1, 1): "bert-generation biogpt blenderbot camembert codegen cohere2 dots3_note dots3_note_text exaone4 "
    "falcon_mamba gemma2 gemma3 gemma4_unified gemma4_unified_text granitemoe_swa hy_v4 jamba marian "
    "megatron-bert mpt openai-gpt opt pegasus phi3 prophetnet xlm-roberta",
    ("causal", 1.4, 1): "roformer xlnet",
    ("seq2seq", 0.35, 3): "pegasus prophetnet",
    ("seq2seq", 0.5, 1): "m2m_100 nllb-moe seamless_m4t seamless_m4t_v2",
    ("seq2seq", 0.6, 1): "qwen2_audio",
    ("seq2seq", 0.7, 3): "bigbird_pegasus pegasus_x",
    ("seq2seq", 1, 1): "audioflamingo3 musicflamingo",
    ("speech", 0.5, 1): "moonshine seamless_m4t",
    ("speech", 0.7, 3): "cohere_asr moonshine_streaming speech-encoder-decoder",
    ("speech", 1, 3): "seamless_m4t_v2 whisper",
    ("speech", 2, 3): "speech_to_text",
}
# Seeds where seed 0 makes a greedy text of few tokens or near ties, by kind
SEEDS: dict[tuple, str] = {
    ("causal", 1): "apertus blenderbot blt cohere2 dbrx doge dots1 exaone4 exaone_moe gemma3n_text gemma4 gemma4_text "
    "gemma4_unified gemma4_unified_text glm gpt-sw3 gpt2 gpt_neox_japanese granite hunyuan_v1_dense hy_v4 "
    "mimo_v2_flash minicpm3 minimax_m2 olmo pegasus qwen2 qwen3 qwen3_moe seed_oss starcoder2 xglm "
    "xlm-roberta-xl",
    ("causal", 2): "arcee bitnet deepseek_v2 gemma3 git glm4_moe lfm2 mpt xmod",
    ("causal", 36): "roformer",
    ("causal", 37): "xlnet",
    ("seq2seq", 1): "glmasr mt5 prophetnet qwen2_audio qwen3_asr umt5",
    ("seq2seq", 2): "t5gemma2",
    ("seq2seq", 3): "m2m_100 nllb-moe seamless_m4t seamless_m4t_v2",
    ("speech", 1): "qwen3_asr whisper",
    ("speech", 2): "canary moonshine pop2piano",
}
# What types that must be given sound take: a name, the shape of a row, and frames to a unit of its length
LISTENING = ("input_features", (None, 16), 16)
WAVES = ("input_values", (None,), 800)
SOUNDS: dict[str, tuple] = {
    "canary": LISTENING,
    "cohere_asr": LISTENING,
    "kyutai_speech_to_text": ("input_values", (1, 80000), 0),
    "moonshine": WAVES,
    "moonshine_streaming": WAVES,
    "pop2piano": ("input_features", (None, 32), 1),
    "seamless_m4t": LISTENING,
    "seamless_m4t_v2": LISTENING,
    "speech-encoder-decoder": WAVES,
    "speech_to_text": LISTENING,
    "speecht5": WAVES,
    "voxtral_realtime": ("input_features", (16, 512), 0),
    "whisper": ("input_features", (16, 32), 0),
}
