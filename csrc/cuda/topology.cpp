#include "cuda/topology.h"

#include <algorithm>
#include <numeric>

#include "cuda/runtime.h"

namespace ringcomm::cuda {

const char* name(Path::Kind kind) {
  static const char* const names[] = {"unknown", "none", "pcie", "nvlink", "same device"};
  return names[kind];
}

Path path_between(int from, int to, int rank) {
  if (from == to) return {Path::kSame, 0};
  const auto attribute = [&](cudaDeviceP2PAttr which) {
    int value = 0;
    check(cudaDeviceGetP2PAttribute(&value, which, from, to), "cudaDeviceGetP2PAttribute", rank);
    return value;
  };
  if (!attribute(cudaDevP2PAttrAccessSupported)) return {Path::kNone, 0};
  // PCIe has no atomics between devices, NVLink has.
  const auto kind = attribute(cudaDevP2PAttrNativeAtomicSupported) ? Path::kNvlink : Path::kPcie;
  return {kind, std::max(0, attribute(cudaDevP2PAttrPerformanceRank))};
}

std::vector<int> ring_order(const std::vector<std::vector<Path>>& paths) {
  const int ranks = static_cast<int>(paths.size());
  std::vector<int> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  for (const auto& row : paths)
    for (const Path& path : row)
      if (path.kind == Path::kUnknown) return order;
  const auto quality = [&](int a, int b) { return std::min(paths[a][b].quality(), paths[b][a].quality()); };
  std::vector<int> best = order;
  std::pair<int, int> best_score{-1, -1};  // worst link, sum
  if (ranks < 3) return order;
  do {
    int worst = quality(order[ranks - 1], order[0]), sum = worst;
    for (int i = 0; i + 1 < ranks; ++i) {
      const int link = quality(order[i], order[i + 1]);
      worst = std::min(worst, link);
      sum += link;
    }
    if (std::pair(worst, sum) > best_score) {
      best_score = {worst, sum};
      best = order;
    }
  } while (std::next_permutation(order.begin() + 1, order.end()));  // in lexical order: the first of equals stays
  return best;
}

}  // namespace ringcomm::cuda
