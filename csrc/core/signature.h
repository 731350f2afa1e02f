// Signatures in words, for errors and records.
#pragma once

#include <string>
#include <vector>

#include "core/engine.h"
#include "core/link.h"

namespace ringcomm {

// Goes with every error that ends a communicator.
inline constexpr const char* kAdvice = "; the communicator is aborted, create a new one";
// Where ranks are left that can go on.
inline constexpr const char* kAdviceToShrink =
    "; the communicator is aborted, go on with shrink(), or create a new one";
inline constexpr const char* kSameCalls = "; every rank must make the same calls in the same order";

// Such as "all_reduce(1024 x float32, sum, auto)"; a message's signature has its tag as root.
std::string describe(const Signature& signature);
std::string describe(const Call& call, int world_size);

// One rank's part of a call that differs.
struct Caller {
  int rank;
  Signature signature;
  std::string site;  // may be empty
};
// "all_reduce #118: rank 3 passed 1024 x float32 (train.py:88), rank 0 passed 1000 x float32 (train.py:91)". The
// callers made calls of one number, two or more of which differ; those that agree are named together.
std::string difference(const std::vector<Caller>& callers);

}  // namespace ringcomm
