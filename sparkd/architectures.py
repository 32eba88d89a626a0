"""Owns which architectures sparkd knows, and what a plan says of one that it or the installed vLLM does not. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkd.installed import models_of
from sparkd.vllm_history import READ_OFF

# What vLLM puts in each other's place where it has one of them (vllm/config/model.py, _SUFFIX_TO_DEFAULTS; registry.py, _normalize_arch).
_ENDS = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding", "EmbeddingModel", "ForSequenceClassification",
    "ForTokenClassification", "ForAudioClassification", "ForImageClassification", "ForVideoClassification", "ClassificationModel",
    "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip


def remark(config: Mapping[str, Any], runtime: Path | None) -> str | None:
    """A sentence where the model's architecture is not known to sparkd, or the vLLM of `runtime` (None: that beside sparkd) has not got it;
    else None. config: config.json. Never a refusal: a plugin may bring it to vLLM, and Transformers may have a class that vLLM runs."""
    names = config.get("architectures")
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        return "Its config.json names no architecture (architectures), so vLLM may not know what it is."
    name, found = str(names[0]), models_of(runtime)
    known = any(_among(str(each), KNOWN) for each in names)
    there = found is None or any(_among(str(each), found[1]) for each in names)
    if known and there:
        return None
    release = f"vLLM {found[0]}" if found is not None else ""
    if known:
        newer = ".".join(map(str, READ_OFF))
        return f"{release}, which is installed, has no {name}, and vLLM {newer} has: a start may fail until that is installed."
    counted = "what is counted is what the keys of its config.json mean in other models"
    if found is None:
        return f"sparkd does not know {name}: {counted}, and there is no vLLM here to say whether it has that."
    if there:
        return f"sparkd does not know {name}, which {release} has: {counted}."
    how = "it starts only where a plugin brings it, or vLLM can run the class that Transformers has for it"
    return f"sparkd does not know {name}, and {release}, which is installed, has no model of that name: {how}; {counted}."


def _among(name: str, models: Collection[str]) -> bool:
    if name in models:
        return True
    end = next((end for end in _ENDS if name.endswith(end)), None)
    return end is not None and any(name.removesuffix(end) + other in models for other in _ENDS)


# The registry of vLLM READ_OFF (vllm/model_executor/models/registry.py): that release is what accounts were held against.
_NAMES = """
AXK1ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaForConditionalGeneration AudioFlamingo3ForConditionalGeneration
BagelForConditionalGeneration BailingMoeForCausalLM BailingMoeV25MTPModel BailingMoeV2ForCausalLM BailingMoeV2_5ForCausalLM
BailingMoeV3ForCausalLM BailingMoeV3MTPModel BailingMoeV3VLForConditionalGeneration BeeForConditionalGeneration BertForMaskedLM
BertForSequenceClassification BertForTokenClassification BertModel BertSpladeSparseEmbeddingModel BgeM3EmbeddingModel
Blip2ForConditionalGeneration BloomForCausalLM CLIPModel ChatGLMForConditionalGeneration ChatGLMModel ClefOmniForJointSchema
Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration CohereAsrForConditionalGeneration
CohereCompassForConditionalGeneration CohereForCausalLM ColBERTJinaRobertaModel ColBERTLfm2Model ColBERTModernBertModel
ColModernVBertForRetrieval ColPaliForRetrieval ColQwen3 ColQwen3_5 Cosmos3EdgeForConditionalGeneration Cosmos3ForConditionalGeneration
CwmForCausalLM DFlash2DraftModel DFlashDraftModel DFlashLagunaForCausalLM DFlashMuseGlimmerAssistantModel DSparkDraftModel
DSparkV41DraftModel DbrxForCausalLM DeciLMForCausalLM DeepSeekMTPModel DeepSeekV4MTPModel DeepseekForCausalLM DeepseekOCR2ForCausalLM
DeepseekOCRForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV32MTPModel DeepseekV3BidirectionalModel DeepseekV3ForCausalLM
DeepseekV41ForCausalLM DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration DeepseekVLV2ForCausalLM DiffusionGemmaForBlockDiffusion
Dots3NoteForCausalLM Dots3NoteMTPModel DotsOCRForCausalLM Eagle2_5_VLForConditionalGeneration Eagle3DeepseekV2ForCausalLM
Eagle3DeepseekV3ForCausalLM Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3ForCausalLM
Eagle3Qwen3vlForCausalLM EagleCohereForCausalLM EagleDeepSeekMTPModel EagleLlama4ForCausalLM EagleLlamaForCausalLM EagleMiniCPMForCausalLM
EagleMistralForCausalLM EagleMistralLarge3ForCausalLM EmbeddingGemma2Model Emu3ForConditionalGeneration Ernie4_5ForCausalLM
Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration ErnieMTPModel Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration
Exaone4_5_MTP ExaoneForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM ExaoneMoeMTP ExtractHiddenStatesModel FalconForCausalLM
FalconH1ForCausalLM FalconMambaForCausalLM FireRedASR2ForConditionalGeneration FlexOlmoForCausalLM FunASRForConditionalGeneration
FunAudioChatForConditionalGeneration GLM4VForCausalLM GPT2ForSequenceClassification GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM
GPTNeoXForCausalLM Gemma2ForCausalLM Gemma2Model Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3TextModel Gemma3nForCausalLM
Gemma3nForConditionalGeneration Gemma4DSparkModel Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4MTPModel
Gemma4UnifiedForConditionalGeneration GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4MoeLiteMTPModel
Glm4MoeMTPModel Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration Glm5NextForCausalLM Glm5NextForConditionalGeneration
Glm5NextMTPModel GlmAsrForConditionalGeneration GlmForCausalLM GlmMoeDsaForCausalLM GlmOcrForConditionalGeneration GlmOcrMTPModel
GptOssForCausalLM Granite4VisionForConditionalGeneration GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM
GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM GraniteSpeechForConditionalGeneration
GraniteSpeechPlusForConditionalGeneration GteModel GteNewForSequenceClassification GteNewModel H2OVLChatModel HCXVisionV2ForCausalLM
HF_ColBERT HYV3ForCausalLM HYV3MTPModel HYV4ForCausalLM HYV4MTPModel HfMoondream HrmTextForCausalLM HunYuanDenseV1ForCausalLM
HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration HyperCLOVAXForCausalLM IQuestCoderForCausalLM IQuestLoopCoderForCausalLM
Idefics3ForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration InklingMTPModel InternLM2ForCausalLM
InternLM2ForRewardModel InternLM3ForCausalLM InternS1ForConditionalGeneration InternS1ProForConditionalGeneration
InternS2MobiusForConditionalGeneration InternS2MobiusMTP InternS2PreviewForConditionalGeneration InternVLChatModel
InternVLForConditionalGeneration IsaacForConditionalGeneration Jais2ForCausalLM JambaForCausalLM JambaForSequenceClassification
JinaEmbeddingsV5Model JinaForRanking JinaVLForRanking K2HorizonForCausalLM K3DSparkModel KananaVForConditionalGeneration
KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration
KimiK3MTPModel KimiLinearForCausalLM KimiVLForConditionalGeneration LLaMAForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
Lfm2VlForConditionalGeneration LiLiCorrDraftModel LightOnOCRForConditionalGeneration Llama4ForCausalLM Llama4ForConditionalGeneration
LlamaBidirectionalForSequenceClassification LlamaBidirectionalModel LlamaForCausalLM LlamaForCausalLMEagle3 LlamaModel
LlamaNemotronVLForSequenceClassification LlamaNemotronVLModel Llama_Nemotron_Nano_VL LlavaForConditionalGeneration
LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration LlavaOnevision2ForConditionalGeneration
LlavaOnevisionForConditionalGeneration LongCatFlashMTPModel LongcatFlashForCausalLM LongcatFlashNgramForCausalLM Mamba2ForCausalLM
MambaForCausalLM MedusaModel MellumForCausalLM MiDashengLMModel MiMoForCausalLM MiMoMTPModel MiMoV2FlashForCausalLM MiMoV2ForCausalLM
MiMoV2MTPModel MiMoV2OmniForCausalLM MiMoV2OmniMTPModel MiniCPM3ForCausalLM MiniCPMForCausalLM MiniCPMO MiniCPMV
MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration MiniMaxM2ForCausalLM MiniMaxM3MTP MiniMaxM3SparseForCausalLM
MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM MistralLarge3ForCausalLM
MistralModel MixtralForCausalLM ModernBertForSequenceClassification ModernBertForTokenClassification ModernBertModel
Molmo2ForConditionalGeneration MolmoForCausalLM Moondream3ForCausalLM MoonshotKimiaForCausalLM MossAudioModel
MossTranscribeDiarizeForConditionalGeneration MuseGlimmerAssistantModel MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration NVLM_D
NanbeigeForCausalLM NemotronForCausalLM NemotronHForCausalLM NemotronHMTPModel NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3
NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 NemotronParseForConditionalGeneration NomicBertModel
OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM
OpenAIPrivacyFilterForTokenClassification OpenCUAForConditionalGeneration OpenPanguMTPModel OpenPanguVLForConditionalGeneration
OpenVLAForActionPrediction OpsColQwen3Model OrionForCausalLM Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM PEagleDraftModel
PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration PanguEmbeddedForCausalLM PanguProMoEV2ForCausalLM
PanguUltraMoEForCausalLM Param2MoEForCausalLM PeagleLlamaForCausalLM PeagleQwen3ForCausalLM Phi3ForCausalLM Phi3VForCausalLM
Phi4ForCausalLMV Phi4MMForCausalLM PhiForCausalLM PhiMoEForCausalLM PixtralForConditionalGeneration Plamo3ForCausalLM
QianfanOCRForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2ForProcessRewardModel Qwen2ForRewardModel
Qwen2Model Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel
Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3ASRForcedAlignerForTokenClassification Qwen3ASRRealtimeGeneration
Qwen3DSparkModel Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3NextMTP Qwen3OmniDSparkModel
Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3VLNemotronEmbedModel
Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MTP Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration Qwen3_5MoeMTP
Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration Qwen4ExpMTP RForConditionalGeneration Rnj1ForCausalLM RobertaForMaskedLM
RobertaForSequenceClassification RobertaForTokenClassification RobertaModel SarvamMLAForCausalLM SarvamMoEForCausalLM SeedOssForCausalLM
SiglipModel SkyworkR1VChatModel SmolLM3ForCausalLM SmolVLMForConditionalGeneration SolarForCausalLM StableLmForCausalLM
Starcoder2ForCausalLM Step1ForCausalLM Step3TextForCausalLM Step3VLForConditionalGeneration Step3p5ForCausalLM Step3p5MTP
Step3p7ForConditionalGeneration StepVLForConditionalGeneration TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM Terratorch
TransformersEmbeddingModel TransformersForCausalLM TransformersForSequenceClassification TransformersMoEEmbeddingModel
TransformersMoEForCausalLM TransformersMoEForSequenceClassification TransformersMultiModalEmbeddingModel TransformersMultiModalForCausalLM
TransformersMultiModalForSequenceClassification TransformersMultiModalMoEForCausalLM UltravoxModel UnlimitedOCRForCausalLM
VaultGemmaForCausalLM VibeVoiceAsrForConditionalGeneration VoxtralForConditionalGeneration VoxtralRealtimeGeneration
VoyageQwen3BidirectionalEmbedModel WhisperForConditionalGeneration XLMRobertaForSequenceClassification XLMRobertaForTokenClassification
XLMRobertaModel Zamba2ForCausalLM
"""
KNOWN = frozenset(_NAMES.split())
