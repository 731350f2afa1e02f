// Every collective of any engine against a scalar reference, bit for bit: the tests of the engines run these cases.
#pragma once

#include <atomic>
#include <cmath>
#include <random>

#include "core/dispatch.h"
#include "cpp/ranks.h"

namespace ringcomm::test {
namespace {

// The same on every rank for the same arguments. Values are small, with fractions that make every order show.
template <typename T>
std::vector<T> values(int rank, std::size_t count, unsigned seed) {
  std::mt19937 random(seed * 1000 + rank);
  std::vector<T> out(count);
  for (auto& x : out) {
    if constexpr (std::is_same_v<typename Element<T>::Acc, bool>)
      x = {static_cast<std::uint8_t>(random() % 3 == 0)};
    else if constexpr (std::is_integral_v<T>)
      x = static_cast<T>(random());
    else
      x = Element<T>::store(static_cast<typename Element<T>::Acc>((random() % 2000) / 977.0 - 1.0));
  }
  return out;
}

template <typename T, typename Combine>
typename Element<T>::Acc tree(const std::vector<std::vector<T>>& in, std::size_t i, int first, int ranks, bool premul) {
  if (ranks == 1) {
    const auto x = Element<T>::load(in[first][i]);
    return premul ? scale(x, 0.5 + first) : x;
  }
  const int left = tree_split(ranks);
  return Combine::apply(tree<T, Combine>(in, i, first, left, premul),
                        tree<T, Combine>(in, i, first + left, ranks - left, premul));
}

template <typename T, typename Combine>
std::vector<T> reference(const std::vector<std::vector<T>>& in, ReduceOp op) {
  std::vector<T> out(in[0].size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto acc = tree<T, Combine>(in, i, 0, static_cast<int>(in.size()), op == ReduceOp::kPremulSum);
    if (op == ReduceOp::kAvg) acc = divide(acc, static_cast<int>(in.size()));
    out[i] = Element<T>::store(acc);
  }
  return out;
}

template <typename T, typename Combine>
std::vector<T> ring_reference(const std::vector<std::vector<T>>& in, ReduceOp op, int chunk) {
  const int w = static_cast<int>(in.size());
  std::vector<T> out(in[0].size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto leaf = [&](int r) {
      const auto x = Element<T>::load(in[r][i]);
      return op == ReduceOp::kPremulSum ? Element<T>::store(scale(x, 0.5 + r)) : in[r][i];
    };
    T value = leaf((chunk + 1) % w);
    for (int k = 2; k <= w; ++k) {
      auto acc = Combine::apply(Element<T>::load(value), Element<T>::load(leaf((chunk + k) % w)));
      if (k == w && op == ReduceOp::kAvg) acc = divide(acc, w);
      value = Element<T>::store(acc);
    }
    out[i] = value;
  }
  return out;
}

template <typename T>
bool same(const T* a, const std::vector<T>& b) {
  return b.empty() || std::memcmp(a, b.data(), b.size() * sizeof(T)) == 0;
}

struct Case {
  Engine& engine;
  DType dtype;
  ReduceOp op;
  std::size_t count;
  Algorithm algorithm;
  bool visible, in_place;

  std::string text(const char* what) const {
    return concat(what, " W=", engine.world_size(), " rank=", engine.rank(), ' ', name(dtype), ' ', name(op),
                  " count=", count, ' ', name(algorithm), visible ? " visible" : "", in_place ? " in-place" : "");
  }
};

// Exact-size memory, private or visible.
template <typename T>
class Buffer {
 public:
  Buffer(const Case& c, std::size_t count) : engine_(c.engine), visible_(c.visible), count_(count) {
    data_ =
        static_cast<T*>(visible_ ? engine_.allocate(count * sizeof(T)) : std::malloc(count * sizeof(T) + (count == 0)));
  }
  Buffer(const Case& c, const std::vector<T>& from) : Buffer(c, from.size()) {
    if (count_) std::memcpy(data_, from.data(), count_ * sizeof(T));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    if (visible_)
      engine_.release(data_);
    else
      std::free(data_);
  }
  T* data() const { return data_; }

 private:
  Engine& engine_;
  const bool visible_;
  const std::size_t count_;
  T* data_;
};

// The cuda engine has oneshot for the small all_reduces of programs alone.
inline bool has_algorithm(const Case& c) {
  if (c.algorithm != Algorithm::kOneshot || std::strcmp(c.engine.kind(), "cuda")) return true;
  if (c.dtype == DType::kInt32 || c.dtype == DType::kInt64 || c.dtype == DType::kFloat32)
    return c.op == ReduceOp::kSum || c.op == ReduceOp::kAvg || c.op == ReduceOp::kMax;
  return is_float(c.dtype) && element_bytes(c.dtype) > 1 && (c.op == ReduceOp::kSum || c.op == ReduceOp::kAvg);
}

template <typename T, typename Combine>
void reductions(const Case& c, unsigned seed) {
  const int w = c.engine.world_size(), rank = c.engine.rank();
  std::vector<std::vector<T>> in;
  for (int r = 0; r < w; ++r) in.push_back(values<T>(r, c.count * w, seed));
  Call call;
  call.dtype = c.dtype;
  call.reduce_op = c.op;
  call.algorithm = c.algorithm;
  call.factor = 0.5 + rank;
  const bool ring = c.algorithm == Algorithm::kRing && w > 1;
  const auto want = reference<T, Combine>(in, c.op);
  {
    Buffer<T> input(c, in[rank]), other(c, c.count * w);
    T* output = c.in_place ? input.data() : other.data();
    call.op = Op::kAllReduce;
    call.input = input.data();
    call.output = output;
    call.count = c.count * w;
    if (!has_algorithm(c)) {
      bool refused = false;
      try {
        run(c.engine, call);
      } catch (const Error& error) {
        refused = error.code() == ErrorCode::kUnsupported;
      }
      require(refused, c.text("all_reduce that is refused"));
      return;
    }
    run(c.engine, call);
    if (!ring) require(same(output, want), c.text("all_reduce"));
    if (!c.in_place) require(same(input.data(), in[rank]), c.text("all_reduce keeps its input"));
  }
  if (c.algorithm == Algorithm::kOneshot) return;
  {
    Buffer<T> input(c, in[rank]), other(c, c.count);
    T* output = c.in_place ? input.data() + rank * c.count : other.data();
    call.op = Op::kReduceScatter;
    call.input = input.data();
    call.output = output;
    call.count = c.count;
    run(c.engine, call);
    const auto all = ring ? ring_reference<T, Combine>(in, c.op, rank) : want;
    const std::vector<T> part(all.begin() + rank * c.count, all.begin() + (rank + 1) * c.count);
    require(same(output, part), c.text("reduce_scatter"));
  }
  for (int root = 0; root < w; root += w > 2 ? w - 1 : 1) {
    Buffer<T> input(c, in[rank]), other(c, c.count * w);
    T* output = rank != root ? nullptr : c.in_place ? input.data() : other.data();
    call.op = Op::kReduce;
    call.root = root;
    call.input = input.data();
    call.output = output;
    call.count = c.count * w;
    run(c.engine, call);
    if (rank == root) require(same(output, ring ? ring_reference<T, Combine>(in, c.op, root) : want), c.text("reduce"));
    if (rank != root || !c.in_place) require(same(input.data(), in[rank]), c.text("reduce keeps its input"));
  }
}

template <typename T>
void movements(const Case& c, unsigned seed) {
  const int w = c.engine.world_size(), rank = c.engine.rank();
  Call call;
  call.dtype = c.dtype;
  call.algorithm = c.algorithm;
  std::vector<T> all;
  for (int r = 0; r < w; ++r)
    for (T x : values<T>(r, c.count, seed)) all.push_back(x);
  const auto mine = values<T>(rank, c.count, seed);
  {
    Buffer<T> input(c, mine), output(c, c.count * w);
    if (c.in_place && c.count) std::memcpy(output.data() + rank * c.count, mine.data(), c.count * sizeof(T));
    call.op = Op::kAllGather;
    call.input = c.in_place ? output.data() + rank * c.count : input.data();
    call.output = output.data();
    call.count = c.count;
    run(c.engine, call);
    require(same(output.data(), all), c.text("all_gather"));
  }
  for (int root = 0; root < w; root += w > 2 ? w - 1 : 1) {
    Buffer<T> input(c, mine), output(c, c.count);
    call.op = Op::kBroadcast;
    call.root = root;
    call.output = c.in_place ? input.data() : output.data();
    call.input = rank == root ? input.data() : nullptr;
    run(c.engine, call);
    require(same(static_cast<T*>(call.output), values<T>(root, c.count, seed)), c.text("broadcast"));
  }
  if (c.algorithm != Algorithm::kAuto) return;
  for (int root = 0; root < w; root += w > 2 ? w - 1 : 1) {
    Buffer<T> input(c, mine), gathered(c, c.count * w), part(c, c.count), scattered(c, all);
    call.op = Op::kGather;
    call.root = root;
    call.input = input.data();
    call.output = rank == root ? gathered.data() : nullptr;
    run(c.engine, call);
    if (rank == root) require(same(gathered.data(), all), c.text("gather"));
    call.op = Op::kScatter;
    call.input = rank == root ? scattered.data() : nullptr;
    call.output = part.data();
    run(c.engine, call);
    require(same(part.data(), mine), c.text("scatter"));
  }
  {
    const auto row = [&](int from, int to) { return values<T>(from * 64 + to, c.count, seed); };
    std::vector<T> sent, want;
    for (int p = 0; p < w; ++p) {
      for (T x : row(rank, p)) sent.push_back(x);
      for (T x : row(p, rank)) want.push_back(x);
    }
    Buffer<T> input(c, sent), output(c, c.count * w);
    call.op = Op::kAllToAll;
    call.root = 0;
    call.input = input.data();
    call.output = output.data();
    run(c.engine, call);
    require(same(output.data(), want), c.text("all_to_all"));
    call.output = input.data();
    run(c.engine, call);
    require(same(input.data(), want), c.text("all_to_all in place"));
  }
}

// Parts of uneven sizes in scattered memory.
void uneven(const Case& c) {
  using T = std::int32_t;
  const int w = c.engine.world_size(), rank = c.engine.rank();
  const auto length = [&](int from, int to) { return (c.count * (from + 1) + 3 * to) % (c.count + 5); };
  std::vector<std::vector<T>> in, out, want;
  Call call;
  call.dtype = DType::kInt32;
  call.op = Op::kAllToAll;
  for (int p = 0; p < w; ++p) {
    in.push_back(values<T>(rank * 64 + p, length(rank, p), 7));
    want.push_back(values<T>(p * 64 + rank, length(p, rank), 7));
    out.emplace_back(want.back().size());
  }
  for (int p = 0; p < w; ++p) {
    call.input_parts.push_back({in[p].data(), in[p].size()});
    call.output_parts.push_back({out[p].data(), out[p].size()});
  }
  run(c.engine, call);
  for (int p = 0; p < w; ++p) require(out[p] == want[p], c.text("uneven all_to_all"));

  call.op = Op::kAllGather;
  call.input_parts.clear();
  call.output_parts.clear();
  const auto mine = values<T>(rank, length(rank, 0), 8);
  call.input = mine.data();
  call.count = mine.size();
  for (int p = 0; p < w; ++p)
    out[p].assign(length(p, 0), 0), call.output_parts.push_back({out[p].data(), out[p].size()});
  run(c.engine, call);
  for (int p = 0; p < w; ++p) require(out[p] == values<T>(p, length(p, 0), 8), c.text("uneven all_gather"));

  call.op = Op::kReduceScatter;
  call.output_parts.clear();
  for (int p = 0; p < w; ++p)
    in[p] = values<T>(rank * 64 + p, length(p, 0), 9), call.input_parts.push_back({in[p].data(), in[p].size()});
  std::vector<T> sum(length(rank, 0)), expected(sum.size(), 0);
  for (int p = 0; p < w; ++p) {
    const auto theirs = values<T>(p * 64 + rank, sum.size(), 9);
    for (std::size_t i = 0; i < sum.size(); ++i) expected[i] = wrapping_add(expected[i], theirs[i]);
  }
  call.output = sum.data();
  call.count = sum.size();
  run(c.engine, call);
  require(sum == expected, c.text("uneven reduce_scatter"));
}

// `any_order`: those of one tag may overtake those of another.
void messages(Engine& engine, std::size_t count, bool any_order) {
  const int w = engine.world_size(), rank = engine.rank();
  std::vector<std::vector<float>> out(2 * w), in(2 * w, std::vector<float>(count));
  std::vector<std::shared_ptr<Request>> requests;
  for (int k = 0; k < 2 * w; ++k) {  // to everyone (itself too), two tags, all in flight at once
    out[k] = values<float>(rank * 64 + k, count, 11);
    Call call;
    call.dtype = DType::kFloat32;
    call.op = Op::kSend;
    call.root = k % w;
    call.tag = k / w;
    call.input = out[k].data();
    call.count = count;
    requests.push_back(submit(engine, call));
  }
  for (int i = 0; i < 2 * w; ++i) {
    const int k = any_order ? 2 * w - 1 - i : i;  // tag 1 before tag 0: those of tag 0 are put aside
    Call call;
    call.dtype = DType::kFloat32;
    call.op = Op::kRecv;
    call.root = k % w;
    call.tag = k / w;
    call.output = in[k].data();
    call.count = count;
    require(run(engine, call) == k % w, "recv names its source");
  }
  for (auto& request : requests) request->wait();
  for (int k = 0; k < 2 * w; ++k)
    require(in[k] == values<float>((k % w) * 64 + (k / w) * w + rank, count, 11),
            concat("send/recv W=", w, " rank=", rank, " k=", k, " count=", count));
}

void asynchronous(Engine& engine) {
  const int w = engine.world_size();
  std::vector<std::vector<std::int64_t>> data;
  std::vector<std::shared_ptr<Request>> requests;
  std::atomic<int> called{0};
  for (int k = 0; k < 20; ++k) {
    data.emplace_back(1000 * k + 1, k + engine.rank());
    Call call;
    call.dtype = DType::kInt64;
    call.op = Op::kAllReduce;
    call.input = call.output = data.back().data();
    call.count = data.back().size();
    if (k % 5 == 4)
      run(engine, call), requests.push_back(nullptr);
    else
      requests.push_back(submit(engine, call)),
          requests.back()->on_done([&](std::exception_ptr error) { called += !error; });
  }
  for (int k = 19; k >= 0; --k) {
    if (requests[k]) requests[k]->wait();
    for (auto x : data[k]) require(x == w * k + w * (w - 1) / 2, "asynchronous all_reduce");
  }
  while (called < 16) std::this_thread::yield();
}

void matrix(Engine& engine, bool quick, bool any_order = true) {
  unsigned seed = 0;
  const std::vector<std::size_t> counts =
      quick ? std::vector<std::size_t>{0, 1, 120, 4099} : std::vector<std::size_t>{0, 1, 7, 120, 1000, 4099, 100003};
  for (std::size_t count : counts)
    for (int d = 0; d <= static_cast<int>(DType::kBool); ++d)
      for (int variant = 0; variant < 8; ++variant) {
        const bool big = count > 5000;
        if (big && d != 0 && d != static_cast<int>(DType::kBFloat16)) continue;
        Case c{engine,
               static_cast<DType>(d),
               ReduceOp::kSum,
               count,
               static_cast<Algorithm>(variant / 2),
               (variant + d) % 4 == 0,
               variant % 2 == 1};
        if (variant / 2 != 3)
          dispatch_dtype(c.dtype, [&](auto element) { movements<typename decltype(element)::Type>(c, ++seed); });
        for (int o = 0; o <= static_cast<int>(ReduceOp::kBxor); ++o) {
          c.op = static_cast<ReduceOp>(o);
          if (!supports(c.dtype, c.op) || (big && o > 1) || (quick && (o + d + variant) % 3)) continue;
          dispatch_reduce(c.dtype, c.op, [&](auto element, auto combine) {
            reductions<typename decltype(element)::Type, decltype(combine)>(c, ++seed);
          });
        }
      }
  for (std::size_t count : {0, 1, 1000, 300001})
    uneven({engine, DType::kInt32, ReduceOp::kSum, count, Algorithm::kAuto, false, false});
  for (std::size_t count : {0, 1, 1000, 700001}) messages(engine, count, any_order);
  asynchronous(engine);
  Call barrier;
  run(engine, barrier);
}

// Small slots: many windows, more than there is credit for, on every algorithm.
void many_windows(Engine& engine) {
  const int rank = engine.rank();
  for (Algorithm algorithm : {Algorithm::kAuto, Algorithm::kRing, Algorithm::kDirect}) {
    Case c{engine, DType::kFloat32, ReduceOp::kSum, 40000, algorithm, false, false};
    reductions<float, Sum>(c, 3);
    movements<float>(c, 4);
  }
  std::vector<float> data(40000, static_cast<float>(rank)), out(40000);
  Call call;
  call.dtype = DType::kFloat32;
  call.op = rank == 0 ? Op::kSend : Op::kRecv;
  call.root = rank == 0 ? 1 : 0;
  call.input = data.data();
  call.output = out.data();
  call.count = data.size();
  if (rank < 2) run(engine, call);
  if (rank == 1) require(out == std::vector<float>(40000, 0.f), "a message of many slices");
}

}  // namespace
}  // namespace ringcomm::test
