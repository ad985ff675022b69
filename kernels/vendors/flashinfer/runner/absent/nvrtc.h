// The GEMMs are compiled by the program nvcc; the calls of the library beside it are compiled all
// the same and never made. Here each says that it failed, so that the library need not be there.
#pragma once

#include <cstddef>

enum nvrtcResult { NVRTC_SUCCESS = 0, NVRTC_ERROR_INTERNAL_ERROR = 11 };
using nvrtcProgram = struct _nvrtcProgram*;

inline char const* nvrtcGetErrorString(nvrtcResult) { return "built without NVRTC"; }
inline nvrtcResult nvrtcCreateProgram(nvrtcProgram*, char const*, char const*, int,
                                      char const* const*, char const* const*) {
  return NVRTC_ERROR_INTERNAL_ERROR;
}
inline nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, char const* const*) {
  return NVRTC_ERROR_INTERNAL_ERROR;
}
inline nvrtcResult nvrtcDestroyProgram(nvrtcProgram*) { return NVRTC_ERROR_INTERNAL_ERROR; }
inline nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t*) {
  return NVRTC_ERROR_INTERNAL_ERROR;
}
inline nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char*) { return NVRTC_ERROR_INTERNAL_ERROR; }
inline nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INTERNAL_ERROR; }
inline nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char*) { return NVRTC_ERROR_INTERNAL_ERROR; }
