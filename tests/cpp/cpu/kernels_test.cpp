// The small parts: number formats over all their values, every instruction set against the scalar arithmetic, the
// reader's opinion of its writers.
//
//   cpu_kernels_test [quick]   quick: not every float
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/dispatch.h"
#include "core/error.h"
#include "cpu/collectives/streaming.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::test {
namespace {

void require(bool ok, const char* what, long detail = 0) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s (%ld)\n", what, detail);
  std::exit(1);
}

// Every value widens and narrows back to itself; the value halfway between two neighbours goes to the even one.
template <typename T>
void formats(const char* what, long count) {
  for (long i = 0; i < count; ++i) {
    T x{static_cast<decltype(T::raw)>(i)};
    const float wide = widen(x);
    const T back = narrow(wide, static_cast<T*>(nullptr));
    if (std::isnan(wide)) {
      require(std::isnan(widen(back)), what, i);
      continue;
    }
    require(back.raw == x.raw, what, i);
    const T next{static_cast<decltype(T::raw)>(i + 1)};
    const float above = widen(next);
    if (i + 1 >= count / 2 || !std::isfinite(above)) continue;
    const float half = static_cast<float>((static_cast<double>(wide) + above) / 2);
    require(narrow(half, static_cast<T*>(nullptr)).raw == (i % 2 == 0 ? x.raw : next.raw),
            "a tie goes to the even neighbour", i);
    require(
        narrow(std::nextafter(half, std::numeric_limits<float>::infinity()), static_cast<T*>(nullptr)).raw == next.raw,
        "above a tie goes up", i);
    require(
        narrow(std::nextafter(half, -std::numeric_limits<float>::infinity()), static_cast<T*>(nullptr)).raw == x.raw,
        "below a tie goes down", i);
  }
  require(std::isnan(widen(narrow(std::numeric_limits<float>::quiet_NaN(), static_cast<T*>(nullptr)))), what, -1);
  const float most = widen(narrow(std::numeric_limits<float>::infinity(), static_cast<T*>(nullptr)));
  require(std::is_same_v<T, Float8E4M3> ? most == 448.0f : std::isinf(most), what, -2);
}

// Whether each `step`th of the floats with the bits first, ..., last narrows to `want`. Optimized: there are 2^32.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3"), flatten))
#endif
bool all_narrow_to(std::uint8_t want, std::uint32_t first, std::uint32_t last, std::uint32_t step) {
  std::uint32_t bad = 0;
  const std::uint32_t count = (last - first) / step + 1;
  for (std::uint32_t i = 0; i < count; ++i)
    bad |= narrow(bits::cast<float>(first + i * step), static_cast<Float8E4M3*>(nullptr)).raw ^ want;
  return bad == 0;
}

// float8_e4m3fn beside its definition, over all its values and (step 1) over every float there is. In order of
// magnitude the floats fall into runs that narrow to the same code, cut halfway between two neighbours; the cut itself
// goes to the even one, and all that is larger, infinity too, to the last one.
void every_float_narrows_to_e4m3(std::uint32_t step) {
  constexpr int kLast = 0x7e;
  const std::uint32_t infinity = 0x7f800000u;
  const auto value = [](int code) { return code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10); };
  require(value(kLast) == 448.0 && std::isnan(widen(Float8E4M3{0x7f})) && std::isnan(widen(Float8E4M3{0xff})),
          "the ends of float8_e4m3fn");
  const auto first_float = [&](int code) -> std::uint32_t {
    if (code == 0) return 0;
    const float halfway = static_cast<float>((value(code - 1) + value(code)) / 2);  // exact
    return bits::cast<std::uint32_t>(halfway) + code % 2;
  };
  for (const int negative : {0, 1}) {
    const std::uint32_t sign = negative ? 0x80000000u : 0u;
    for (int code = 0; code <= kLast; ++code) {
      const auto want = static_cast<std::uint8_t>(code | negative << 7);
      const float exact = static_cast<float>(negative ? -value(code) : value(code));
      require(bits::cast<std::uint32_t>(widen(Float8E4M3{want})) == bits::cast<std::uint32_t>(exact),
              "float8_e4m3fn widens by its definition", want);
      const std::uint32_t last = code == kLast ? infinity : first_float(code + 1) - 1;
      require(all_narrow_to(want, sign | first_float(code), sign | last, step) &&
                  all_narrow_to(want, sign | last, sign | last, 1),
              "float8_e4m3fn narrows by its definition", want);
    }
    require(all_narrow_to(0x7f, sign | (infinity + 1), sign | 0x7fffffffu, step), "one NaN", negative);
  }
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) float processor_widens(std::uint16_t raw) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(raw)));
}
__attribute__((target("f16c"))) std::uint16_t processor_narrows(float x) {
  return static_cast<std::uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT), 0));
}

// The scalar definition of float16 beside the processor's own instructions: every half, and floats of every sign,
// exponent and upper mantissa, with lower mantissas on both sides of every tie.
void instructions_agree() {
  for (long i = 0; i < 65536; ++i) {
    const float ours = widen(Float16{static_cast<std::uint16_t>(i)}),
                theirs = processor_widens(static_cast<std::uint16_t>(i));
    require(
        std::isnan(theirs) ? std::isnan(ours) : bits::cast<std::uint32_t>(ours) == bits::cast<std::uint32_t>(theirs),
        "float16 widens as the processor does it", i);
  }
  std::mt19937 random(7);
  for (std::uint32_t upper = 0; upper < 65536; ++upper)
    for (const std::uint32_t lower : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu, 0x2000u, 0x3000u, 0x7fffu, 0x8000u,
                                      0x8001u, 0xffffu, static_cast<std::uint32_t>(random() & 0xffffu)}) {
      const float x = bits::cast<float>(upper << 16 | lower);
      const std::uint16_t ours = narrow(x, static_cast<Float16*>(nullptr)).raw;
      require(std::isnan(x) ? ours == 0x7e00 : ours == processor_narrows(x), "float16 narrows as the processor does it",
              static_cast<long>(upper << 16 | lower));
    }
}
#endif

template <typename T>
bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<typename Element<T>::Acc>) return std::isnan(Element<T>::load(x));
  return false;
}

// Random bits: all of a type's values, the odd ones too. The kernels, over odd counts and offsets, must agree with the
// scalar definition in all but the payload of a NaN.
template <typename T, typename Combine>
void reduce_agrees(DType dtype, ReduceOp op, int ranks, std::mt19937& random) {
  constexpr std::size_t kCount = 2500, kOffset = 3;
  std::vector<std::vector<T>> in(ranks, std::vector<T>(kCount + kOffset));
  for (auto& values : in)
    for (auto& x : values) {
      const std::uint64_t noise = (static_cast<std::uint64_t>(random()) << 32) | random();
      __builtin_memcpy(&x, &noise, sizeof x);
      if constexpr (std::is_same_v<T, Bool>) x.raw &= 1;
    }
  const void* sources[16];
  double factors[16];
  for (int r = 0; r < ranks; ++r)
    sources[r] = in[r].data() + kOffset, factors[r] = std::is_integral_v<T> ? r + 1 : 0.5 + r;
  std::vector<T> want(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    std::vector<typename Element<T>::Acc> leaf(ranks);
    for (int r = 0; r < ranks; ++r) {
      leaf[r] = Element<T>::load(in[r][i + kOffset]);
      if (op == ReduceOp::kPremulSum) leaf[r] = scale(static_cast<typename Element<T>::Acc>(leaf[r]), factors[r]);
    }
    const auto tree = [&](auto&& self, int first, int n) -> typename Element<T>::Acc {
      if (n == 1) return leaf[first];
      return Combine::apply(self(self, first, tree_split(n)), self(self, first + tree_split(n), n - tree_split(n)));
    };
    auto acc = tree(tree, 0, ranks);
    if (op == ReduceOp::kAvg) acc = divide(acc, ranks);
    want[i] = Element<T>::store(acc);
  }
  for (const cpu::Kernels* kernels : cpu::usable_kernels())
    for (int form = 0; form < 3; ++form) {  // plain, streaming, two outputs
      const std::string cell = concat(kernels->isa, ": ", name(dtype), " ", name(op), " of ", ranks, " ranks, element");
      std::vector<T> a(kCount + 7), b(kCount + 7);
      void* outputs[] = {a.data() + 1, b.data() + 2};
      kernels->reduce({dtype, op, sources, ranks, factors, ranks, outputs, form == 2 ? 2 : 1, kCount, form != 0});
      for (std::size_t i = 0; i < kCount; ++i) {
        require(is_nan(want[i]) ? is_nan(a[i + 1]) : !__builtin_memcmp(&a[i + 1], &want[i], sizeof(T)), cell.c_str(),
                static_cast<long>(i));
        if (form == 2)
          require(!__builtin_memcmp(&a[i + 1], &b[i + 2], sizeof(T)), "two outputs are one result",
                  static_cast<long>(i));
      }
    }
}

void kernels_agree() {
  std::mt19937 random(20);
  for (int d = 0; d <= static_cast<int>(DType::kBool); ++d)
    for (int o = 0; o <= static_cast<int>(ReduceOp::kBxor); ++o)
      for (int ranks : {1, 2, 3, 4, 7, 8}) {
        const auto dtype = static_cast<DType>(d);
        const auto op = static_cast<ReduceOp>(o);
        if (!supports(dtype, op)) continue;
        dispatch_reduce(dtype, op, [&](auto element, auto combine) {
          reduce_agrees<typename decltype(element)::Type, decltype(combine)>(dtype, op, ranks, random);
        });
      }
}

void copies_agree() {
  std::vector<char> from(5000), to(5000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + 1);
  for (const cpu::Kernels* kernels : cpu::usable_kernels())
    for (std::size_t offset : {0, 1, 63, 64})
      for (std::size_t nbytes : {0, 1, 63, 64, 127, 1000, 4096}) {
        std::fill(to.begin(), to.end(), 0);
        kernels->copy(to.data() + offset, from.data() + 5, nbytes, true);
        for (std::size_t i = 0; i < to.size(); ++i)
          require(to[i] == (i >= offset && i < offset + nbytes ? from[i - offset + 5] : 0),
                  "a streaming copy copies what it should", static_cast<long>(i));
      }
}

// Returns how many of the next slots are written with streaming stores, each costing what its kind does.
int streamed_of(cpu::SlotWriting& writing, int slots, std::int64_t cached_ns, std::int64_t streamed_ns,
                const cpu::SlotCosts& reading) {
  int count = 0;
  for (int i = 0; i < slots; ++i) {
    const bool streamed = writing.next(1 << 20, reading);
    writing.record(1 << 20, streamed, 1 << 20, streamed ? streamed_ns : cached_ns);
    count += streamed;
  }
  return count;
}

void the_cheaper_kind_of_slot_is_chosen() {
  constexpr std::int64_t fast = 40000, medium = 100000, slow = 250000;
  const cpu::SlotCosts equal = {50, 50};
  cpu::SlotWriting writing;
  require(streamed_of(writing, 170, slow, medium, {}) == 10,
          "some slots of both kinds until the reader tells its costs");
  const int found_out = streamed_of(writing, 1000, slow, medium, equal);
  require(found_out > 900, "slots that are slow are streamed");
  require(found_out < 1000, "some are still written through the caches");
  require(streamed_of(writing, 1000, fast, medium, equal) < 200, "slots that have become fast are streamed no longer");
  require(streamed_of(writing, 10, slow, medium, equal) <= 1, "a few slow slots may have been interrupted");
  require(streamed_of(writing, 1000, fast, medium, {800, 100}) > 900, "what the readers pay counts");
  require(streamed_of(writing, 1000, slow, medium, {10, 900}) < 20, "for either kind");
}

// What a reader measures reaches the writer in one word, and only if it has changed.
void a_reader_tells_what_reading_costs() {
  cpu::SlotReading reading;
  Flag told[cpu::kCostClasses] = {};
  const std::size_t large = 2 * cpu::kCachedMessageBytes;
  reading.record(large, true, 2048, 300, told);
  require(told[0] == 0 && told[1] == 0, "one kind alone says nothing");
  reading.record(large, false, 1024, 300, told);
  require(told[0] == 0, "small messages have costs of their own");
  const cpu::SlotCosts costs = cpu::SlotCosts::unpacked(told[1]);
  require(costs.known() && costs.streamed == 150 && costs.cached == 300, "the costs of both kinds");
  const Flag before = told[1];
  reading.record(large, true, 1024, 9000, told);
  require(told[1] == before, "one slow slot adds an eighth, which is not told");
  reading.record(large, true, 1024, 9000, told);
  require(told[1] != before, "what changes is told");
  require(reading.measures(true, 4096), "a slot of another kind is measured");
  require(!reading.measures(true, 4096), "of the same kind, only some are");
  require(reading.measures(true, cpu::kAlwaysMeasuredBytes), "large ones are measured");
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  formats<ringcomm::Float16>("float16", 65536);
  formats<ringcomm::BFloat16>("bfloat16", 65536);
  formats<ringcomm::Float8E4M3>("float8_e4m3fn", 256);
  formats<ringcomm::Float8E5M2>("float8_e5m2", 256);
  every_float_narrows_to_e4m3(quick ? 4093 : 1);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("f16c")) instructions_agree();
#endif
  kernels_agree();
  copies_agree();
  the_cheaper_kind_of_slot_is_chosen();
  a_reader_tells_what_reading_costs();
  std::printf("cpu_kernels_test passed\n");
}
