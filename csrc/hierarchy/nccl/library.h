// The functions of NCCL that the transport needs: loaded at run time, never linked. The declarations are our own, for
// the few functions whose binary interface has not changed since 2.18.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstddef>
#include <string>

namespace ringcomm::nccl {

inline constexpr int kOldestVersion = 21800;

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
inline constexpr int kUint8 = 1;  // a data type

using Comm = struct ncclComm*;
struct UniqueId {
  char bytes[128];
};
// The configuration of version 2.18; later versions read as many bytes as `nbytes` says.
struct Config {
  std::size_t nbytes = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kOldestVersion;
  int blocking = 0;  // no call waits for another rank
  int cluster_blocks = INT_MIN;
  int least_blocks = INT_MIN;
  int most_blocks = INT_MIN;
  const char* network = nullptr;
  int shares_resources = INT_MIN;
};

// X(member, symbol, result, parameters)
#define RINGCOMM_FOR_EACH_NCCL_FUNCTION(X)                                                              \
  X(get_version, "ncclGetVersion", Result, (int* version))                                              \
  X(get_unique_id, "ncclGetUniqueId", Result, (UniqueId * id))                                          \
  X(init_rank, "ncclCommInitRankConfig", Result, (Comm * comm, int ranks, UniqueId, int rank, Config*)) \
  X(finalize, "ncclCommFinalize", Result, (Comm))                                                       \
  X(destroy, "ncclCommDestroy", Result, (Comm))                                                         \
  X(abort, "ncclCommAbort", Result, (Comm))                                                             \
  X(get_async_error, "ncclCommGetAsyncError", Result, (Comm, Result * error))                           \
  X(error_string, "ncclGetErrorString", const char*, (Result))                                          \
  X(last_error, "ncclGetLastError", const char*, (Comm))                                                \
  X(send, "ncclSend", Result, (const void*, std::size_t count, int type, int peer, Comm, cudaStream_t)) \
  X(recv, "ncclRecv", Result, (void*, std::size_t count, int type, int peer, Comm, cudaStream_t))       \
  X(group_start, "ncclGroupStart", Result, ())                                                          \
  X(group_end, "ncclGroupEnd", Result, ())

struct Library {
#define X(member, symbol, result, parameters) result(*member) parameters = nullptr;
  RINGCOMM_FOR_EACH_NCCL_FUNCTION(X)
#undef X
  int version = 0;           // 23007
  std::string where;         // the file
  std::string text() const;  // "2.30.7"
  // "unhandled system error (ncclSystemError): connection refused"
  std::string explain(Result result, Comm comm) const;

  // Returns the library at `path`; with an empty path the one that the process has loaded already, else the loader's
  // choice. It stays loaded. Throws kUnsupported: no library, a missing function, or too old a version.
  static const Library& load(const std::string& path);
};

}  // namespace ringcomm::nccl
