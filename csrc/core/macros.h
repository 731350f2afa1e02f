// What a function must carry to compile for both the host and a CUDA device. The only `#ifdef __CUDACC__` besides
// sync.h (memory order) lives here.
#pragma once

#if defined(__CUDACC__)
#define RINGCOMM_HD __host__ __device__ __forceinline__
#else
#define RINGCOMM_HD inline
#endif
