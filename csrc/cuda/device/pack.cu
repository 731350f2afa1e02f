// The bucket kernels copy the elements of many tensors into one bucket, or back, with a cast and a factor. The elements
// of all pieces are numbered consecutively; a warp takes tiles of them, whichever pieces they belong to.
#include "cuda/device/combine.h"
#include "cuda/device/kernels.h"

namespace ringcomm::cuda {

namespace {

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
  static constexpr int kBatch = kFromBytes == 16 ? 4 : 8;  // chunks that a thread has in flight

 public:
  static constexpr u64 kTile = 2ull * kBatch * kElements * kWarp;

  RINGCOMM_DEVICE explicit Packer(const PackArgs& args)
      : args_(args), factor_(static_cast<Wide>(args.factor)), copies_(std::is_same_v<From, To> && !args.scaled) {}

  RINGCOMM_DEVICE void tile(u64 first, u64 last) const {
    for (int p = piece_of(args_, first); p < args_.num_pieces; ++p) {
      const u64 begin = p == 0 ? 0 : args_.end[p - 1], end = args_.end[p];
      if (begin >= last) return;
      const Piece piece(args_.source[p], args_.target[p], end - begin);
      move(piece, first <= begin ? 0 : piece.cut(first - begin), last < end ? piece.cut(last - begin) : piece.count);
    }
  }

 private:
  // Elements [body, tail) of a piece move in chunks, each to a whole vector of the target. Where the source begins
  // `shift` bytes behind a vector of its own, a chunk is cut out of two vectors, both of which lie inside the piece.
  struct Piece {
    const char* from;
    char* to;
    u64 count, body, tail;
    u32 shift;

    RINGCOMM_DEVICE Piece(const char* source, char* target, u64 elements) : from(source), to(target), count(elements) {
      body = (0 - reinterpret_cast<u64>(to)) % kToBytes / sizeof(To);
      shift = static_cast<u32>((reinterpret_cast<u64>(from) + body * sizeof(From)) % kFromBytes);
      if (body * sizeof(From) < shift) body += kElements;
      u64 chunks = body < count ? (count - body) / kElements : 0;
      const u64 behind = (count - body - chunks * kElements) * sizeof(From);
      if (shift != 0 && chunks != 0 && behind < kFromBytes - shift) --chunks;
      if (chunks == 0) body = count;
      tail = body + chunks * kElements;
    }
    // Where the tile that begins at element `at` begins: what is before the body is in one tile, what is behind it too.
    RINGCOMM_DEVICE u64 cut(u64 at) const {
      return at < body ? 0 : smaller(body + (at - body) / kElements * kElements, tail);
    }
  };

  // Elements [first, last) of a piece, moved by a warp.
  RINGCOMM_DEVICE void move(const Piece& piece, u64 first, u64 last) const {
    if (last == 0) return;
    const u64 begin = larger(first, piece.body), end = smaller(last, piece.tail);
    const u32 chunks = static_cast<u32>((end - begin) / kElements);
    const char* from = piece.from + begin * sizeof(From) - piece.shift + lane_id() * kFromBytes;
    char* to = piece.to + begin * sizeof(To) + lane_id() * kToBytes;
    for (u32 i = lane_id(); i < chunks; i += kBatch * kWarp) {
      Chunk<kFromBytes> low[kBatch]{}, high[kBatch]{};
      RINGCOMM_UNROLL for (u32 k = 0; k < kBatch; ++k) {
        if (i + k * kWarp >= chunks) continue;
        low[k] = load_chunk<kFromBytes>(from + k * kWarp * kFromBytes);
        if (piece.shift != 0) high[k] = load_chunk<kFromBytes>(from + (k * kWarp + 1) * kFromBytes);
      }
      RINGCOMM_UNROLL for (u32 k = 0; k < kBatch; ++k) {
        if (i + k * kWarp >= chunks) continue;
        store_chunk<kToBytes>(to + k * kWarp * kToBytes, convert(cut_out(low[k], high[k], piece.shift)));
      }
      from += kBatch * kWarp * kFromBytes;
      to += kBatch * kWarp * kToBytes;
    }
    const u32 before = first == 0 ? static_cast<u32>(piece.body) : 0;
    const u32 behind = last == piece.count ? static_cast<u32>(piece.count - piece.tail) : 0;
    const auto at = [&](u32 i) { return i < before ? i : piece.tail + (i - before); };
    in_flight<1>(
        lane_id(), kWarp, before + behind,
        [&](u32 i) { return load_one(reinterpret_cast<const From*>(piece.from) + at(i)); },
        [&](u32 i, From value) { store_one(reinterpret_cast<To*>(piece.to) + at(i), convert(value)); });
  }
  // The chunk that begins with byte `shift` of the first of two.
  RINGCOMM_DEVICE static Chunk<kFromBytes> cut_out(const Chunk<kFromBytes>& low, const Chunk<kFromBytes>& high,
                                                   u32 shift) {
    constexpr int kWords = kFromBytes / 4;
    u32 word[2 * kWords];
    RINGCOMM_UNROLL for (int i = 0; i < 2 * kWords; ++i) { word[i] = i < kWords ? low.word[i] : high.word[i - kWords]; }
    RINGCOMM_UNROLL for (u32 skip = kWords / 2; skip > 0; skip /= 2) {
      RINGCOMM_UNROLL for (u32 i = 0; i < kWords + skip; ++i) {
        if ((shift & 4 * skip) != 0 && i + skip < 2 * kWords) word[i] = word[i + skip];
      }
    }
    Chunk<kFromBytes> result;
    RINGCOMM_UNROLL for (int i = 0; i < kWords; ++i) {
      result.word[i] = static_cast<u32>((static_cast<u64>(word[i + 1]) << 32 | word[i]) >> shift % 4 * 8);
    }
    return result;
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
RINGCOMM_KERNEL(2 * kMostThreads)  // so few registers that a multiprocessor has room for two blocks
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
