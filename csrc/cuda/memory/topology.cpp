#include "cuda/memory/topology.h"

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

namespace {

// How well a ring of ranks goes: its slowest link, then the sum of all links.
using Score = std::pair<int, int>;

class RingSearch {
 public:
  explicit RingSearch(const std::vector<std::vector<Path>>& paths) : paths_(paths), order_(paths.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    score_ = score(order_);
  }

  // Compares all rings. In lexical order, so that the first of equals stays.
  void try_all() {
    std::vector<int> order = order_;
    do take_if_better(order);
    while (std::next_permutation(order.begin() + 1, order.end()));
  }
  // Goes to the nearest rank again and again, then reverses parts of the ring as long as this makes it better.
  void improve() {
    std::vector<int> order = order_;
    for (std::size_t i = 1; i + 1 < order.size(); ++i) {
      const auto nearest = std::max_element(order.begin() + i, order.end(), [&](int a, int b) {
        const int to_a = quality(order[i - 1], a), to_b = quality(order[i - 1], b);
        return to_a < to_b || (to_a == to_b && a > b);
      });
      std::iter_swap(order.begin() + i, nearest);
    }
    take_if_better(order);
    for (bool better = true; better;) {
      better = false;
      for (std::size_t first = 1; first + 1 < order_.size(); ++first)
        for (std::size_t last = first + 1; last < order_.size(); ++last) {
          order = order_;
          std::reverse(order.begin() + first, order.begin() + last + 1);
          better = take_if_better(order) || better;
        }
    }
  }
  const std::vector<int>& order() const { return order_; }

 private:
  int quality(int a, int b) const { return std::min(paths_[a][b].quality(), paths_[b][a].quality()); }
  Score score(const std::vector<int>& order) const {
    Score score{quality(order.back(), order.front()), 0};
    for (std::size_t i = 0; i < order.size(); ++i) {
      const int link = quality(order[i], order[(i + 1) % order.size()]);
      score = {std::min(score.first, link), score.second + link};
    }
    return score;
  }
  bool take_if_better(const std::vector<int>& order) {
    const Score score = this->score(order);
    if (score <= score_) return false;
    score_ = score;
    order_ = order;
    return true;
  }

  const std::vector<std::vector<Path>>& paths_;
  std::vector<int> order_;
  Score score_;
};

constexpr std::size_t kMostToTryAll = 8;  // 5,040 rings

}  // namespace

std::vector<int> ring_order(const std::vector<std::vector<Path>>& paths) {
  RingSearch search(paths);
  for (const auto& row : paths)
    for (const Path& path : row)
      if (path.kind == Path::kUnknown) return search.order();
  if (paths.size() <= kMostToTryAll)
    search.try_all();
  else
    search.improve();
  return search.order();
}

}  // namespace ringcomm::cuda
