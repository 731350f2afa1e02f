// The qualifiers that compile a function for both the host and a CUDA device. The only `#ifdef __CUDACC__` besides that
// of sync.h (memory order) is here.
#pragma once

#if defined(__CUDACC__)
#define RINGCOMM_HD __host__ __device__ __forceinline__
#else
#define RINGCOMM_HD inline
#endif
