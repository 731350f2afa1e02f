// Launches of kernels: how many blocks fit, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/kernels.h"
#include "cuda/runtime.h"

namespace ringcomm::cuda {

// How many blocks of `threads` threads fit at once on `device`, the current one. The first use loads the kernel; later,
// loading might wait for kernels that wait for this rank.
int room_for(const void* kernel, int threads, int device, int rank);
template <typename Args>
int room_for(Kernel<Args> kernel, int threads, int device, int rank) {
  return room_for(reinterpret_cast<const void*>(kernel), threads, device, rank);
}

template <typename Args>
void launch(Kernel<Args> kernel, const char* name, dim3 grid, int threads, const Args& args, cudaStream_t stream,
            bool together, int rank) {
#if defined(RINGCOMM_EMULATE)
  check(emulator::launch(kernel, name, grid, dim3(threads), args, stream, together), name, rank);
#else
  void* params[] = {const_cast<Args*>(&args)};
  const void* const code = reinterpret_cast<const void*>(kernel);
  check(together ? cudaLaunchCooperativeKernel(code, grid, dim3(threads), params, 0, stream)
                 : cudaLaunchKernel(code, grid, dim3(threads), params, 0, stream),
        name, rank);
#endif
}

}  // namespace ringcomm::cuda
