// A C interface of one instantiation of TensorRT-LLM's fused mixture-of-experts runner: bfloat16
// activations, E4M3 weights, block scales, as FlashInfer ships its source.
//
// Every function returns 0, or another number with its reason in moe_runner_error(). Pointers are
// of the current device; the work is put on the given stream and not waited for.

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cutlass_fused_moe_kernels.cuh"
#include "moe_kernels.h"
#include "tensorrt_llm/common/workspace.h"
#include "tensorrt_llm/deep_gemm/compiler.cuh"

namespace kernels = tensorrt_llm::kernels::cutlass_kernels;
namespace extensions = tensorrt_llm::cutlass_extensions;

namespace {

using Runner = kernels::CutlassMoeFCRunner<__nv_bfloat16, __nv_fp8_e4m3>;

thread_local std::string last_error;

template <typename Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (std::exception const& caught) {
    last_error = caught.what();
  } catch (...) {
    last_error = "an exception without a text";
  }
  return 1;
}

}  // namespace

// What one call of the layer is about. Its order is that of `Layer` in ../runner_library.py.
struct MoeLayer {
  void const* input;           // bf16 [rows, hidden]
  int const* selected;         // int32 [rows, top_k], ids of all ranks' experts
  float const* final_scales;   // fp32 [rows, top_k]
  void const* fc1;             // e4m3 [local, 2 * inter, hidden], rows of up before those of gate
  void const* fc2;             // e4m3 [local, hidden, inter]
  float const* fc1_scales;     // fp32 [local, 2 * inter / 128, hidden / 128]
  float const* fc2_scales;     // fp32 [local, hidden / 128, inter / 128]
  float const* swiglu_alpha;   // fp32 [local] or null
  float const* swiglu_beta;    // fp32 [local] or null
  float const* swiglu_limit;   // fp32 [local] or null: any of the three makes it SwigluBias
  void* output;                // bf16 [rows, hidden]
  void* workspace;             // moe_runner_workspace() bytes, aligned to 128
  int64_t rows, hidden, inter;
  int experts, top_k;          // experts of all ranks
  int ep_size, ep_rank;
  int dependent_launch;        // 1 as FlashInfer has it on SM90
};

namespace {

kernels::ActivationParams activation_of(MoeLayer const& layer) {
  bool const biased = layer.swiglu_alpha || layer.swiglu_beta || layer.swiglu_limit;
  return kernels::ActivationParams(
      biased ? kernels::ActivationType::SwigluBias : kernels::ActivationType::Swiglu,
      layer.swiglu_alpha, layer.swiglu_beta, layer.swiglu_limit);
}

// The map of rows stands behind the runner's own workspace.
std::pair<size_t, size_t> workspace_of(Runner& runner, MoeLayer const& layer) {
  size_t const own = runner.getWorkspaceSize(
      layer.rows, layer.hidden, layer.inter, layer.experts, layer.top_k,
      activation_of(layer).activation_type,
      kernels::MOEParallelismConfig(1, 0, layer.ep_size, layer.ep_rank), /*use_lora=*/false,
      /*use_deepseek_fp8_block_scale=*/true, /*use_mxfp8_act_scaling=*/false,
      /*min_latency_mode=*/false, /*use_awq=*/false);
  size_t const map = static_cast<size_t>(layer.rows) * layer.top_k * sizeof(int);
  return {tensorrt_llm::common::alignSize(own, tensorrt_llm::common::kCudaMemAlign), map};
}

}  // namespace

extern "C" {

char const* moe_runner_error() { return last_error.c_str(); }

// The GEMMs are compiled at their first use; `include` holds deep_gemm's headers.
int moe_runner_create(char const* include, void** made) {
  return guarded([&] {
    deep_gemm::jit::Compiler::setIncludeDirs({std::filesystem::path(include)});
    auto runner = std::make_unique<Runner>();
    // No GEMM of block scales reads it; only its being there is asked for.
    extensions::CutlassGemmConfig const config(
        extensions::CutlassTileConfigSM90::CtaShape128x16x128B,
        extensions::MainloopScheduleType::AUTO, extensions::EpilogueScheduleType::AUTO,
        extensions::ClusterShape::ClusterShape_1x1x1);
    runner->setTactic(config, config);
    *made = runner.release();
  });
}

void moe_runner_destroy(void* runner) { delete static_cast<Runner*>(runner); }

int moe_runner_workspace(void* runner, MoeLayer const* layer, size_t* bytes) {
  return guarded([&] {
    auto const [own, map] = workspace_of(*static_cast<Runner*>(runner), *layer);
    *bytes = own + map;
  });
}

int moe_runner_run(void* runner, MoeLayer const* asked, void* stream) {
  return guarded([&] {
    MoeLayer const& layer = *asked;
    Runner& moe = *static_cast<Runner*>(runner);
    auto const [own, map] = workspace_of(moe, layer);
    (void)map;
    char* workspace = static_cast<char*>(layer.workspace);
    tensorrt_llm::kernels::LoraParams no_lora{};
    kernels::MoeMinLatencyParams no_latency{};
    moe.runMoe(layer.input, /*input_sf=*/nullptr, /*swizzled_input_sf=*/false, layer.selected,
               layer.final_scales, layer.fc1, /*fc1_expert_biases=*/nullptr, activation_of(layer),
               layer.fc2, /*fc2_expert_biases=*/nullptr,
               kernels::QuantParams::FP8BlockScaling(layer.fc1_scales, layer.fc2_scales),
               layer.rows, layer.hidden, /*unpadded_hidden_size=*/layer.hidden, layer.inter,
               layer.experts, layer.top_k, workspace, layer.output,
               reinterpret_cast<int*>(workspace + own),
               kernels::MOEParallelismConfig(1, 0, layer.ep_size, layer.ep_rank),
               /*enable_alltoall=*/false, /*use_lora=*/false, no_lora,
               /*use_deepseek_fp8_block_scale=*/true, /*use_mxfp8_act_scaling=*/false,
               /*min_latency_mode=*/false, no_latency, layer.dependent_launch != 0,
               static_cast<cudaStream_t>(stream));
    cudaError_t const launched = cudaGetLastError();
    if (launched != cudaSuccess) throw std::runtime_error(cudaGetErrorString(launched));
  });
}

}  // extern "C"
