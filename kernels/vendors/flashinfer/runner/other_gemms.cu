// What the runner asks of the GEMMs that are not block-scaled. Their questions are answered by
// TensorRT-LLM's source; the ways to run one of them throw, so that none of some hundred kernels
// is instantiated for a layer that never reaches them.

#include <stdexcept>

#include "moe_gemm_template_dispatch.h"
#include "moe_kernels.h"

namespace tensorrt_llm::kernels {

int Lora_run(LoraImpl*, int64_t, int64_t, void const*, int32_t const*, void const* const*, int,
             void* const*, void*, cudaStream_t) {
  throw std::runtime_error("no LoRA is built");
}

}  // namespace tensorrt_llm::kernels

namespace tensorrt_llm::kernels::cutlass_kernels {

using Gemms = MoeGemmRunner<__nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16>;
using Input = GroupedGemmInput<__nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16, __nv_bfloat16>;
using Config = cutlass_extensions::CutlassGemmConfig;

[[noreturn]] static void refuse() {
  throw std::runtime_error("only the GEMMs of block scales are built");
}

template <>
void Gemms::moeGemm(Input, TmaWarpSpecializedGroupedGemmInput) {
  refuse();
}

template <>
void Gemms::moeGemmBiasAct(Input, TmaWarpSpecializedGroupedGemmInput) {
  refuse();
}

template <>
int Gemms::queryOccupancyForConfig(Config const&) {
  refuse();
}

template Gemms::MoeGemmRunner();
template std::vector<Config> Gemms::getConfigs(bool) const;
template std::vector<Config> Gemms::getConfigs(int, bool);
template bool Gemms::isTmaWarpSpecialized(Config) const;
template bool Gemms::supportsTmaWarpSpecialized(int);
template bool Gemms::isFusedGatedActivation(Config, ActivationType, int, int) const;
template size_t Gemms::getMaxWorkspaceSize(int) const;
template int Gemms::getSM() const;

}  // namespace tensorrt_llm::kernels::cutlass_kernels
