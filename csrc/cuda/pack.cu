// The bucket kernels copy the elements of many tensors into one bucket, or back, with a cast and a factor. The elements
// of all pieces are numbered consecutively; a warp takes tiles of them, whichever pieces they belong to.
#include "cuda/combine.h"
#include "cuda/kernels.h"

namespace ringcomm::cuda {

namespace {

constexpr u64 kTileAlign = 16;  // elements: a tile begins on a whole vector of its piece, whatever the types

// The first piece that ends after element `at`.
RINGCOMM_DEVICE int piece_of(const PackArgs& args, u64 at) {
  int low = 0, high = args.num_pieces - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (args.end[middle] > at)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

template <typename From, typename To>
class Packer {
  // Values are widened exactly and multiplied in float32, or in float64 if either type is float64.
  static constexpr bool kDouble = std::is_same_v<From, double> || std::is_same_v<To, double>;
  using Wide = std::conditional_t<kDouble, double, float>;
  // 16 bytes of the wider type, and as many elements of the other.
  static constexpr int kElements = 16 / static_cast<int>(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  static constexpr int kFromBytes = kElements * sizeof(From), kToBytes = kElements * sizeof(To);
  static constexpr int kBatch = kFromBytes == 16 ? 4 : 8;  // loads that a thread has in flight

 public:
  static constexpr u64 kTile = 2ull * kBatch * kElements * kWarp;
  static_assert(kTileAlign % kElements == 0, "a tile begins with a whole chunk");

  RINGCOMM_DEVICE explicit Packer(const PackArgs& args)
      : args_(args), factor_(static_cast<Wide>(args.factor)), copies_(std::is_same_v<From, To> && !args.scaled) {}

  RINGCOMM_DEVICE void tile(u64 first, u64 last) const {
    for (int p = piece_of(args_, first); p < args_.num_pieces; ++p) {
      const u64 begin = p == 0 ? 0 : args_.end[p - 1], end = args_.end[p];
      if (begin >= last) return;
      const u64 from = first <= begin ? 0 : cut(first - begin);
      piece(p, from, last < end ? cut(last - begin) : end - begin);
    }
  }

 private:
  RINGCOMM_DEVICE static u64 cut(u64 at) { return at / kTileAlign * kTileAlign; }

  // Elements [first, last) of a piece, copied by a warp.
  RINGCOMM_DEVICE void piece(int p, u64 first, u64 last) const {
    const char* const from = args_.source[p] + first * sizeof(From);
    char* const to = args_.target[p] + first * sizeof(To);
    const u64 count = last - first, chunks = aligned(from) && aligned(to) ? count / kElements : 0;
    in_flight<kBatch>(
        lane_id(), kWarp, chunks, [&](u64 i) { return load_chunk<kFromBytes>(from + i * kFromBytes); },
        [&](u64 i, const Chunk<kFromBytes>& chunk) { store_chunk<kToBytes>(to + i * kToBytes, convert(chunk)); });
    const From* const source = reinterpret_cast<const From*>(from) + chunks * kElements;
    To* const target = reinterpret_cast<To*>(to) + chunks * kElements;
    in_flight<4>(
        lane_id(), kWarp, count - chunks * kElements, [&](u64 i) { return load_one(source + i); },
        [&](u64 i, From value) { store_one(target + i, convert(value)); });
  }
  RINGCOMM_DEVICE Chunk<kToBytes> convert(const Chunk<kFromBytes>& chunk) const {
    if constexpr (std::is_same_v<From, To>)
      if (copies_) return chunk;
    Chunk<kToBytes> result{};
    RINGCOMM_UNROLL for (int i = 0; i < kElements; ++i)
        put_element<To>(result.word, i, convert(element<From>(chunk.word, i)));
    return result;
  }
  RINGCOMM_DEVICE To convert(From value) const {
    if constexpr (std::is_same_v<From, To>)
      if (copies_) return value;
    if constexpr (std::is_floating_point_v<AccOf<From>>) {
      const Wide wide = static_cast<Wide>(Element<From>::load(value)) * factor_;
      return Element<To>::store(static_cast<AccOf<To>>(wide));
    } else {
      return value;  // integers are only ever copied
    }
  }

  const PackArgs& args_;
  const Wide factor_;
  const bool copies_;
};

template <typename From, typename To>
RINGCOMM_KERNEL(kMostThreads)
pack(const __grid_constant__ PackArgs args) {
  const Packer<From, To> packer(args);
  const u64 total = args.num_pieces == 0 ? 0 : args.end[args.num_pieces - 1];
  const u64 warps = blockDim.x / kWarp, step = gridDim.x * warps * packer.kTile;
  for (u64 at = (blockIdx.x * warps + threadIdx.x / kWarp) * packer.kTile; at < total; at += step)
    packer.tile(at, smaller(at + packer.kTile, total));
}

template <typename From>
Kernel<PackArgs> pack_from(DType to) {
  switch (to) {
    case DType::kFloat32:
      return pack<From, float>;
    case DType::kFloat64:
      return pack<From, double>;
    case DType::kFloat16:
      return pack<From, Float16>;
    case DType::kBFloat16:
      return pack<From, BFloat16>;
    default:
      return nullptr;
  }
}
// An 8-bit float is converted only to and from float32.
template <typename Narrow>
Kernel<PackArgs> pack_from_narrow(DType to, DType narrow) {
  if (to == DType::kFloat32) return pack<Narrow, float>;
  return to == narrow ? pack<std::uint8_t, std::uint8_t> : nullptr;
}
Kernel<PackArgs> copy_of(std::size_t element) {
  switch (element) {
    case 1:
      return pack<std::uint8_t, std::uint8_t>;
    case 2:
      return pack<std::uint16_t, std::uint16_t>;
    case 4:
      return pack<std::uint32_t, std::uint32_t>;
    default:
      return pack<std::uint64_t, std::uint64_t>;
  }
}

}  // namespace

Kernel<PackArgs> pack_kernel(DType from, DType to) {
  switch (from) {
    case DType::kFloat32:
      if (to == DType::kFloat8E4M3) return pack<float, Float8E4M3>;
      if (to == DType::kFloat8E5M2) return pack<float, Float8E5M2>;
      return pack_from<float>(to);
    case DType::kFloat64:
      return pack_from<double>(to);
    case DType::kFloat16:
      return pack_from<Float16>(to);
    case DType::kBFloat16:
      return pack_from<BFloat16>(to);
    case DType::kFloat8E4M3:
      return pack_from_narrow<Float8E4M3>(to, from);
    case DType::kFloat8E5M2:
      return pack_from_narrow<Float8E5M2>(to, from);
    default:
      return from == to ? copy_of(element_bytes(from)) : nullptr;
  }
}

}  // namespace ringcomm::cuda
