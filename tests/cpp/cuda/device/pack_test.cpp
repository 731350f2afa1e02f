// The kernels of a rank's own memory on the emulator. Buckets: random lists of tensors into one and back, in all casts,
// aligned or not, against the rule (widened, multiplied, rounded once) element by element. Two messages into one: all
// types and operators, in place or not, against the arithmetic of core/reduce.h.
//
//   cuda_pack_test [quick | number of cases [first seed]]
#include <cmath>
#include <iterator>
#include <memory>

#include "core/dispatch.h"
#include "cpp/cuda/device/world.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace ringcomm::test {
namespace {

template <typename From, typename To>
To packed(From value, double factor, bool scaled) {
  if constexpr (std::is_same_v<From, To>) {
    if (!scaled) return value;
  }
  constexpr bool kDouble = std::is_same_v<From, double> || std::is_same_v<To, double>;
  using Wide = std::conditional_t<kDouble, double, float>;
  const Wide wide = static_cast<Wide>(Element<From>::load(value)) * static_cast<Wide>(factor);
  return Element<To>::store(static_cast<typename Element<To>::Acc>(wide));
}

// Calls body(Element<T>) for the types that are cast.
template <typename F>
void dispatch_castable(DType dtype, F&& body) {
  dispatch_dtype(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    if constexpr (std::is_floating_point_v<typename Element<T>::Acc>) body(element);
  });
}

constexpr std::size_t kGuardBytes = 64;  // before and behind every target

class PackCall {
 public:
  PackCall(DType from, DType to, double factor) : from_(from), to_(to), scaled_(factor != 1.0), factor_(factor) {
    args_.factor = factor;
    args_.scaled = scaled_;
  }
  explicit PackCall(Random& random) {
    const bool casts = random.one_in(2);
    from_ = casts ? castable(random) : static_cast<DType>(random.below(static_cast<int>(DType::kBool) + 1));
    to_ = casts ? castable(random) : from_;
    if (casts && random.one_in(3)) {  // an 8-bit float and float32
      from_ = random.pick({DType::kFloat8E4M3, DType::kFloat8E5M2});
      to_ = DType::kFloat32;
      if (random.one_in(2)) std::swap(from_, to_);
    }
    scaled_ = casts && random.one_in(2);
    factor_ = scaled_ ? random.pick({0.25, 1.0 / 3, -7.0}) : 1.0;
    args_.factor = factor_;
    args_.scaled = scaled_;
    const int pieces = random.one_in(8) ? 0 : random.one_in(4) ? random.between(1, 160) : random.between(1, 9);
    const bool shifted = random.one_in(3);
    for (int p = 0; p < pieces; ++p) {
      const std::size_t count = random.count(pieces > 20 ? 100 : 3000);
      const std::size_t source = shifted ? random.below(16) : 0;
      add(random, count, source, shifted ? random.below(16) : 0);
    }
  }

  // A piece whose memory begins so many elements, modulo a vector of 16 bytes, after a line.
  void add(Random& random, std::size_t count, std::size_t source, std::size_t target) {
    const std::size_t from = element_bytes(from_), to = element_bytes(to_);
    const int p = args_.num_pieces++;
    sources_.emplace_back(count * from, source * from % 16);
    targets_.emplace_back(kGuardBytes + count * to + kGuardBytes, target * to % 16, kGuard);
    fill_bits(random, sources_.back());
#if defined(__SANITIZE_ADDRESS__)  // nor is what lies before a source read
    ASAN_POISON_MEMORY_REGION(sources_.back().data() - source * from % 16, source * from % 16);
#endif
    args_.source[p] = sources_.back().data();
    args_.target[p] = target_of(p);
    args_.end[p] = (p == 0 ? 0 : args_.end[p - 1]) + count;
  }
  int pieces() const { return args_.num_pieces; }

  bool run(Random& random, std::string& error) {
    emulator::Options options;
    options.seed = random.next();
    emulator::Simulation simulation(options);
    const unsigned threads = cuda::kWarp * random.between(1, 3);
    simulation.launch("pack", cuda::pack_kernel(from_, to_), dim3(random.between(1, 3)), dim3(threads), args_);
    const bool ok = simulation.run();
    error = simulation.error;
    return ok;
  }
  std::string wrong() const {
    for (int p = 0; p < args_.num_pieces; ++p) {
      const std::size_t count = sources_[p].nbytes() / element_bytes(from_);
      const char* const behind = target_of(p) + count * element_bytes(to_);
      for (std::size_t i = 0; i < kGuardBytes; ++i)
        if (targets_[p].data()[i] != static_cast<char>(kGuard) || behind[i] != static_cast<char>(kGuard))
          return "piece " + std::to_string(p) + " wrote beyond its ends";
      if (from_ == to_ && !scaled_) {
        if (count && std::memcmp(sources_[p].data(), target_of(p), sources_[p].nbytes()) != 0)
          return "piece " + std::to_string(p) + " is no copy";
        continue;
      }
      for (std::size_t i = 0; i < count; ++i)
        if (!right(p, i)) return "element " + std::to_string(i) + " of piece " + std::to_string(p);
    }
    return "";
  }
  std::string what() const {
    return std::string(name(from_)) + " to " + name(to_) + " times " + std::to_string(factor_) + ", " +
           std::to_string(args_.num_pieces) + " pieces: ";
  }

 private:
  static constexpr int kGuard = 0x5a;

  char* target_of(int p) const { return targets_[p].data() + kGuardBytes; }
  static DType castable(Random& random) {
    return random.pick({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  }
  static void fill_bits(Random& random, const Memory& to) {
    for (std::size_t i = 0; i < to.nbytes(); ++i) to.data()[i] = static_cast<char>(random.next());
  }
  bool right(int p, std::size_t i) const {
    bool same = false;
    dispatch_castable(from_, [&](auto from) {
      dispatch_castable(to_, [&](auto to) {
        using From = typename decltype(from)::Type;
        using To = typename decltype(to)::Type;
        From value;
        To got;
        std::memcpy(&value, sources_[p].data() + i * sizeof(From), sizeof(From));
        std::memcpy(&got, target_of(p) + i * sizeof(To), sizeof(To));
        const To want = packed<From, To>(value, factor_, scaled_);
        const auto wide = Element<To>::load(want);
        same = std::isnan(wide) ? std::isnan(Element<To>::load(got)) : std::memcmp(&got, &want, sizeof(To)) == 0;
      });
    });
    return same;
  }

  DType from_, to_;
  bool scaled_;
  double factor_;
  std::vector<Memory> sources_, targets_;
  cuda::PackArgs args_{};
};

std::string one_call(std::uint64_t seed) {
  Random random(seed);
  PackCall call(random);
  std::string error;
  if (!call.run(random, error)) return call.what() + error;
  const std::string wrong = call.wrong();
  return wrong.empty() ? "" : call.what() + wrong;
}

// Every alignment of a source to every alignment of a target, in pieces of a few elements and of a few tiles.
struct Pair {
  DType from, to;
  double factor;
};
constexpr Pair kPairs[] = {
    {DType::kUInt8, DType::kUInt8, 1},          {DType::kInt16, DType::kInt16, 1},
    {DType::kInt32, DType::kInt32, 1},          {DType::kInt64, DType::kInt64, 1},
    {DType::kFloat32, DType::kBFloat16, 0.125}, {DType::kBFloat16, DType::kFloat32, 1},
    {DType::kFloat32, DType::kFloat32, -7},     {DType::kFloat16, DType::kFloat16, 0.25},
    {DType::kFloat64, DType::kFloat16, 1},      {DType::kFloat16, DType::kFloat64, 1.0 / 3},
    {DType::kFloat32, DType::kFloat64, 1},      {DType::kFloat64, DType::kFloat32, 1},
    {DType::kFloat32, DType::kFloat8E4M3, 1},   {DType::kFloat8E5M2, DType::kFloat32, 0.5},
};
std::string one_of_all_alignments(std::uint64_t seed) {
  Random random(seed);
  const Pair& pair = kPairs[seed % std::size(kPairs)];
  const std::size_t sources = 16 / element_bytes(pair.from), targets = 16 / element_bytes(pair.to);
  const auto made = [&] { return std::make_unique<PackCall>(pair.from, pair.to, pair.factor); };
  auto call = made();
  const auto finish = [&]() -> std::string {
    std::string error;
    if (!call->run(random, error)) return call->what() + error;
    const std::string wrong = call->wrong();
    return wrong.empty() ? "" : call->what() + wrong;
  };
  for (std::size_t source = 0; source < sources; ++source) {
    for (std::size_t target = 0; target < targets; ++target) {
      const std::size_t few = random.below(80), tiles = random.below(2000);
      for (const std::size_t count : {few, tiles, random.below(5), random.below(40)}) {
        call->add(random, count, source, target);
        if (call->pieces() < cuda::kMaxPieces) continue;
        if (const std::string wrong = finish(); !wrong.empty()) return wrong;
        call = made();
      }
    }
  }
  return finish();
}

std::string casts_that_are_not(std::uint64_t) {
  const bool none =
      !cuda::pack_kernel(DType::kInt32, DType::kInt64) && !cuda::pack_kernel(DType::kFloat16, DType::kFloat8E4M3) &&
      !cuda::pack_kernel(DType::kFloat8E5M2, DType::kFloat64) &&
      !cuda::pack_kernel(DType::kFloat8E5M2, DType::kFloat8E4M3) && !cuda::pack_kernel(DType::kInt32, DType::kFloat32);
  return none ? "" : "a cast that there should not be";
}

// ---- two messages into one

template <typename T, typename Combine>
T combined(T first, T second, Combine, ReduceOp op, int divisor) {
  auto value = Combine::apply(Element<T>::load(first), Element<T>::load(second));
  if (op == ReduceOp::kAvg) value = divide(value, divisor);
  return Element<T>::store(value);
}

class CombineCall {
 public:
  explicit CombineCall(Random& random) {
    do {
      dtype_ = static_cast<DType>(random.below(static_cast<int>(DType::kBool) + 1));
      op_ = static_cast<ReduceOp>(random.below(static_cast<int>(ReduceOp::kBxor) + 1));
    } while (!supports(dtype_, op_) || op_ == ReduceOp::kPremulSum);
    const std::size_t element = element_bytes(dtype_);
    count_ = random.count(3000);
    for (int i = 0; i < 3; ++i)
      memory_.emplace_back(count_ * element, random.one_in(3) ? element * random.below(16 / element) : 0);
    for (int i = 0; i < 2; ++i) {
      fill(dtype_, memory_[i].data(), count_, random);
      before_.emplace_back(memory_[i].data(), count_ * element);
    }
    output_ = random.between(0, 2);
    divisor_ = random.between(1, 9);
  }

  bool run(Random& random, std::string& error) const {
    const cuda::Arithmetic arithmetic = cuda::arithmetic_of(dtype_, op_);
    cuda::KnownArgs args{};
    args.num_sources = 2;
    args.num_targets = 1;
    args.divisor = op_ == ReduceOp::kAvg ? divisor_ : 1;
    const void* const sources[] = {memory_[0].data(), memory_[1].data()};
    void* const target = memory_[output_].data();
    args.add(sources, &target, count_ * static_cast<std::uint64_t>(arithmetic.scale));
    emulator::Options options;
    options.seed = random.next();
    emulator::Simulation simulation(options);
    const unsigned threads = cuda::kWarp * random.between(1, 3);
    simulation.launch("combine", cuda::known_kernel(arithmetic.dtype, arithmetic.op), dim3(random.between(1, 3)),
                      dim3(threads), args);
    const bool ok = simulation.run();
    error = simulation.error;
    return ok;
  }
  std::string wrong() const {
    std::string what;
    dispatch_reduce(dtype_, op_, [&](auto element, auto combine) {
      using T = typename decltype(element)::Type;
      for (std::size_t i = 0; i < count_ && what.empty(); ++i) {
        T two[2], got;
        for (int k = 0; k < 2; ++k) std::memcpy(&two[k], before_[k].data() + i * sizeof(T), sizeof(T));
        std::memcpy(&got, memory_[output_].data() + i * sizeof(T), sizeof(T));
        const T want = combined(two[0], two[1], combine, op_, divisor_);
        if (std::memcmp(&got, &want, sizeof(T)) != 0) what = "element " + std::to_string(i);
      }
    });
    for (int k = 0; k < 2; ++k)
      if (k != output_ && std::memcmp(memory_[k].data(), before_[k].data(), before_[k].size()) != 0)
        what = "an input was written";
    return what;
  }
  std::string what() const {
    return std::string(name(dtype_)) + ' ' + name(op_) + ", " + std::to_string(count_) + " elements, output " +
           std::to_string(output_) + ": ";
  }

 private:
  DType dtype_;
  ReduceOp op_;
  std::size_t count_ = 0;
  int output_ = 2, divisor_ = 1;  // 0 and 1: in place of a message
  std::vector<Memory> memory_;
  std::vector<std::string> before_;
};

std::string one_combine(std::uint64_t seed) {
  Random random(seed);
  const CombineCall call(random);
  std::string error;
  if (!call.run(random, error)) return call.what() + error;
  const std::string wrong = call.wrong();
  return wrong.empty() ? "" : call.what() + wrong;
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const auto [quick, cases, first] = parse_arguments(argc, argv, 600);
  int bad = run_cases("pack", cases, first, one_call);
  bad += run_cases("pack, all alignments", quick ? static_cast<int>(std::size(kPairs)) : cases / 4, first,
                   one_of_all_alignments);
  bad += run_cases("pack, casts that are not", 1, first, casts_that_are_not);
  bad += run_cases("combine", cases, first, one_combine);
  return bad != 0;
}
