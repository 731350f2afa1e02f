// Texts of signatures, for errors and records.
#pragma once

#include <string>
#include <vector>

#include "core/engine.h"
#include "core/error.h"
#include "core/link.h"

namespace ringcomm {

// Ends every error that ends a communicator.
inline constexpr const char* kAdvice = "; the communicator is aborted, create a new one";
// Replaces kAdvice if the surviving ranks can continue.
inline constexpr const char* kAdviceToShrink =
    "; the communicator is aborted, go on with shrink(), or create a new one";
inline constexpr const char* kSameCalls = "; every rank must make the same calls in the same order";

// Returns a text such as "all_reduce(1024 x float32, sum, auto)"; the signature of a message has the tag as its root.
std::string describe(const Signature& signature);
// Returns ", root 3" or ", mark 3"; empty for an op without a root, for a barrier, and for the mark 0.
std::string root_text(const Signature& signature);
std::string describe(const Call& call, int world_size);

// `sequence`: the number of the call; `history`: the hash of the calls before it.
Signature signature_of(const Call& call, int world_size, std::uint64_t sequence = 0, std::uint64_t history = 0);

// A scan sends with uneven all_to_alls. Their mark says how it scans, so that ranks that scan differently get an error.
inline constexpr int kScan = 1 << 30;
inline int scan_mark(DType dtype, ReduceOp op, bool exclusive) {
  return kScan | static_cast<int>(dtype) << 8 | static_cast<int>(op) << 1 | static_cast<int>(exclusive);
}
inline bool is_scan(Op op, int root) { return op == Op::kAllToAll && root >= kScan; }
// Returns "scan" or "exscan" for a marked all_to_all, "barrier before a gather" for a marked barrier, else the name of
// the op.
const char* name_of(Op op, int root);
// Returns "all_to_all: rank 1 expected 4 elements from rank 0, which sends 3; recv_counts must ...".
std::string other_counts(int root, int rank, std::uint64_t expected, int peer, std::uint64_t sent, const char* unit);

// Returns a text such as "12 bytes of float32", for the errors of messages.
inline std::string message_text(std::size_t nbytes, DType dtype) { return concat(nbytes, " bytes of ", name(dtype)); }

// One rank's signature in a call that differs.
struct Caller {
  int rank;
  Signature signature;
  std::string site;  // may be empty
};
// Returns "all_reduce #118: rank 3 passed 1024 x float32 (train.py:88), rank 0 passed 1000 x float32 (train.py:91)".
// The callers' calls have the same number, and at least two of them differ; ranks with equal calls are named together.
std::string difference(const std::vector<Caller>& callers);

}  // namespace ringcomm
