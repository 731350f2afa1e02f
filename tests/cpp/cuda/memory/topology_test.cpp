// The order of the ring on made-up machines, against a search that was written another way:
//   cuda_topology_test
#include "cuda/memory/topology.h"

#include <algorithm>
#include <functional>
#include <random>

#include "cpp/ranks.h"

namespace ringcomm::test {
namespace {

using cuda::Path;
using Paths = std::vector<std::vector<Path>>;

Paths machine(int world_size, const std::function<Path(int, int)>& path) {
  Paths paths(world_size);
  for (int a = 0; a < world_size; ++a)
    for (int b = 0; b < world_size; ++b) paths[a].push_back(a == b ? Path{Path::kSame, 0} : path(a, b));
  return paths;
}

std::string text(const std::vector<int>& order) {
  std::string out;
  for (const int rank : order) out += std::to_string(rank) + " ";
  return out;
}

bool is_ring(const std::vector<int>& order, int world_size) {
  std::vector<int> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (int r = 0; r < world_size; ++r)
    if (static_cast<int>(sorted.size()) != world_size || sorted[r] != r) return false;
  return order[0] == 0;
}

std::vector<int> links(const Paths& paths, const std::vector<int>& order) {
  std::vector<int> out;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const int a = order[i], b = order[(i + 1) % order.size()];
    out.push_back(std::min(paths[a][b].quality(), paths[b][a].quality()));
  }
  return out;
}
int crossings(const std::vector<int>& order, const std::function<int(int)>& island) {
  int n = 0;
  for (std::size_t i = 0; i < order.size(); ++i) n += island(order[i]) != island(order[(i + 1) % order.size()]);
  return n;
}

// Depth first, keeping the best of all rings; lower ranks first, so that the first of equals is the lexical one.
struct Search {
  const Paths& paths;
  std::vector<int> now{0}, best{};
  int best_worst = -1, best_sum = -1;
  void go() {
    const int w = static_cast<int>(paths.size());
    if (static_cast<int>(now.size()) == w) {
      const auto all = links(paths, now);
      const int worst = *std::min_element(all.begin(), all.end());
      int sum = 0;
      for (const int link : all) sum += link;
      if (worst > best_worst || (worst == best_worst && sum > best_sum)) {
        best = now;
        best_worst = worst;
        best_sum = sum;
      }
      return;
    }
    for (int next = 1; next < w; ++next) {
      if (std::find(now.begin(), now.end(), next) != now.end()) continue;
      now.push_back(next);
      go();
      now.pop_back();
    }
  }
};

void check(const Paths& paths, const std::string& what) {
  const auto order = cuda::ring_order(paths);
  Search search{paths};
  search.go();
  require(is_ring(order, static_cast<int>(paths.size())), what + ": a ring from rank 0, got " + text(order));
  require(order == search.best, what + ": expected " + text(search.best) + ", got " + text(order));
}

constexpr Path kNone{Path::kNone, 0}, kPcie{Path::kPcie, 1}, kNvlink{Path::kNvlink, 0}, kNvlinkSlow{Path::kNvlink, 1};

void test_equal() {
  for (int w = 1; w <= 8; ++w) {
    std::vector<int> identity;
    for (int r = 0; r < w; ++r) identity.push_back(r);
    for (const Path& path : {kNone, kPcie, kNvlink, Path{Path::kSame, 0}, Path{}})
      require(cuda::ring_order(machine(w, [&](int, int) { return path; })) == identity, "all links equal: identity");
  }
}

void test_islands() {
  for (int w = 4; w <= 8; w += 2) {
    const auto halves = [w](int r) { return r < w / 2; };
    const auto odd = [](int r) { return r & 1; };
    const std::vector<std::function<int(int)>> islands_of = {halves, odd};
    for (const auto& island : islands_of) {
      const Paths paths = machine(w, [&](int a, int b) { return island(a) == island(b) ? kNvlink : kPcie; });
      check(paths, "two islands of NVLink");
      require(crossings(cuda::ring_order(paths), island) == 2, "two islands: two crossings");
    }
  }
}

// The first machine of its kind: two squares of four, each with diagonals, joined at the corners; some links doubled.
void test_cube_mesh() {
  const auto linked = [](int a, int b) -> Path {
    if (a > b) std::swap(a, b);
    const bool same_square = a / 4 == b / 4, corners = b - a == 4;
    if (!same_square && !corners) return kPcie;
    const int double_links[8][2] = {{0, 3}, {0, 4}, {1, 2}, {1, 5}, {2, 3}, {4, 7}, {5, 6}, {6, 7}};
    for (const auto& [x, y] : double_links)
      if (a == x && b == y) return kNvlink;
    return kNvlinkSlow;
  };
  const Paths paths = machine(8, linked);
  check(paths, "cube mesh");
  const auto order = cuda::ring_order(paths);
  for (const int link : links(paths, order)) require(link == kNvlink.quality(), "cube mesh: only double links");
}

// Neighbours only: a ring through all of a chain has to go back over a missing link, once at least.
void test_chain() {
  const Paths paths = machine(6, [](int a, int b) { return std::abs(a - b) == 1 ? kNvlink : kPcie; });
  check(paths, "chain");
  require(text(cuda::ring_order(paths)) == "0 1 2 3 4 5 ", "chain: along it, and back once");
  const int at[] = {2, 0, 5, 1, 4, 3};  // rank -> place in the chain
  check(machine(6, [&](int a, int b) { return std::abs(at[a] - at[b]) == 1 ? kNvlink : kPcie; }), "a mixed up chain");
}

// Ranks 0 and 2 share a device, 1 and 3 another one.
void test_shared_devices() {
  const Paths paths = machine(4, [](int a, int b) { return a % 2 == b % 2 ? Path{Path::kSame, 0} : kPcie; });
  check(paths, "two devices of two ranks each");
  require(text(cuda::ring_order(paths)) == "0 1 3 2 ", "two devices of two ranks each: ranks of a device side by side");
}

void test_worst_before_sum() {
  // A ring with a missing link can have the larger sum; the other one must win.
  Paths paths = machine(4, [](int, int) { return kPcie; });
  const auto set = [&](int a, int b, Path path) { paths[a][b] = paths[b][a] = path; };
  set(0, 1, kNvlink), set(1, 2, kNvlink), set(2, 3, kNvlink), set(0, 3, kNone);
  check(paths, "worst link first");
  require(crossings(cuda::ring_order(paths), [](int r) { return r == 0 || r == 3; }) >= 2, "no missing link");
  for (const int link : links(paths, cuda::ring_order(paths))) require(link >= kPcie.quality(), "no missing link");
}

void test_random() {
  std::mt19937 random(1);
  const Path kinds[] = {kNone, kPcie, kNvlinkSlow, kNvlink, {Path::kSame, 0}};
  for (int i = 0; i < 60; ++i) {
    const Paths paths = machine(2 + static_cast<int>(random() % 6), [&](int, int) { return kinds[random() % 5]; });
    check(paths, "random machine " + std::to_string(i) + " (one-way links too)");
  }
}

// More ranks than all orders can be tried for: islands whose ranks are not neighbours in number, entered once each.
void test_many_ranks() {
  for (const int w : {9, 16, 32}) {
    std::vector<int> identity(w);
    for (int r = 0; r < w; ++r) identity[r] = r;
    require(cuda::ring_order(machine(w, [](int, int) { return kNvlink; })) == identity, "many equal links: identity");
    for (const int islands : {2, 4}) {
      const auto island = [islands](int r) { return r % islands; };
      const auto order =
          cuda::ring_order(machine(w, [&](int a, int b) { return island(a) == island(b) ? kNvlink : kPcie; }));
      require(is_ring(order, w), concat("a ring of ", w));
      require(crossings(order, island) == islands, concat(w, " ranks in ", islands, " islands: ", text(order)));
    }
    // A chain in mixed order, closed by one slow link: only the search from nearest neighbours can follow it.
    const auto place = [w](int r) { return r * 5 % w; };
    const Paths chain = machine(w, [&](int a, int b) { return std::abs(place(a) - place(b)) == 1 ? kNvlink : kPcie; });
    int slow = 0;
    for (const int link : links(chain, cuda::ring_order(chain))) slow += link < kNvlink.quality();
    require(slow <= 2, concat("a chain of ", w, " ranks: ", slow, " slow links"));
  }
}

void test_quality() {
  const Path slowest_nvlink{Path::kNvlink, 1 << 20};
  require(slowest_nvlink.quality() > (Path{Path::kPcie, 0}).quality(), "any NVLink beats any PCIe");
  require(kNvlink.quality() > kNvlinkSlow.quality(), "a lower performance rank is better");
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  using namespace ringcomm::test;
  test_equal();
  test_many_ranks();
  test_islands();
  test_cube_mesh();
  test_chain();
  test_shared_devices();
  test_worst_before_sum();
  test_random();
  test_quality();
  std::printf("ok: %ld checks\n", cells.load());
}
