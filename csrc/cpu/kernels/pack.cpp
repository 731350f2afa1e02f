#include "cpu/kernels/pack.h"

#include <cstring>
#include <type_traits>

#include "core/dispatch.h"

namespace ringcomm::cpu {

namespace {

template <typename From, typename To>
void convert(const PackCall::Piece& piece, double factor) {
  using Wide = std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;
  const From* const source = static_cast<const From*>(piece.source);
  To* const target = static_cast<To*>(piece.target);
  const Wide scale = static_cast<Wide>(factor);
  for (std::size_t i = 0; i < piece.count; ++i) {
    const Wide value = static_cast<Wide>(Element<From>::load(source[i])) * scale;
    target[i] = Element<To>::store(static_cast<typename Element<To>::Acc>(value));
  }
}

template <typename F>
void dispatch_castable(DType dtype, F&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Element<float>{});
    case DType::kFloat64:
      return body(Element<double>{});
    case DType::kFloat16:
      return body(Element<Float16>{});
    case DType::kBFloat16:
      return body(Element<BFloat16>{});
    default:
      not_in_this_build(dtype, ReduceOp::kSum);
  }
}
template <typename F>
void dispatch_8_bits(DType dtype, F&& body) {
  if (dtype == DType::kFloat8E4M3) return body(Element<Float8E4M3>{});
  if (dtype == DType::kFloat8E5M2) return body(Element<Float8E5M2>{});
  not_in_this_build(dtype, ReduceOp::kSum);
}

// Calls body(from, to) for every pair of types that check_packing accepts.
template <typename F>
void dispatch_cast(DType from, DType to, F&& body) {
  if (element_bytes(from) == 1) return dispatch_8_bits(from, [&](auto source) { body(source, Element<float>{}); });
  if (element_bytes(to) == 1) return dispatch_8_bits(to, [&](auto target) { body(Element<float>{}, target); });
  dispatch_castable(from, [&](auto source) { dispatch_castable(to, [&](auto target) { body(source, target); }); });
}

}  // namespace

void pack(const PackCall& packing) {
  if (packing.from == packing.to && packing.factor == 1.0) {
    for (const PackCall::Piece& piece : packing.pieces)
      if (piece.count) std::memcpy(piece.target, piece.source, piece.count * element_bytes(packing.from));
    return;
  }
  dispatch_cast(packing.from, packing.to, [&](auto from, auto to) {
    for (const PackCall::Piece& piece : packing.pieces)
      convert<typename decltype(from)::Type, typename decltype(to)::Type>(piece, packing.factor);
  });
}

}  // namespace ringcomm::cpu
