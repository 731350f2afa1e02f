#include "bind/c10d/task.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

#include "bind/c10d/device.h"

namespace ringcomm {
namespace {

std::optional<DType> engine_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return DType::kFloat32;
    case c10::ScalarType::Double:
      return DType::kFloat64;
    case c10::ScalarType::Half:
      return DType::kFloat16;
    case c10::ScalarType::BFloat16:
      return DType::kBFloat16;
    case c10::ScalarType::Float8_e4m3fn:
      return DType::kFloat8E4M3;
    case c10::ScalarType::Float8_e5m2:
      return DType::kFloat8E5M2;
    case c10::ScalarType::Char:
      return DType::kInt8;
    case c10::ScalarType::Short:
      return DType::kInt16;
    case c10::ScalarType::Int:
      return DType::kInt32;
    case c10::ScalarType::Long:
      return DType::kInt64;
    case c10::ScalarType::Byte:
      return DType::kUInt8;
    case c10::ScalarType::Bool:
      return DType::kBool;
    case c10::ScalarType::UInt16:
      return DType::kUInt16;
    case c10::ScalarType::UInt32:
      return DType::kUInt32;
    case c10::ScalarType::UInt64:
      return DType::kUInt64;
    case c10::ScalarType::ComplexHalf:
      return DType::kComplex32;
    case c10::ScalarType::ComplexFloat:
      return DType::kComplex64;
    case c10::ScalarType::ComplexDouble:
      return DType::kComplex128;
    default:
      return std::nullopt;
  }
}

ReduceOp engine_op(const Site& site, const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProd;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kPremulSum;
    default:
      break;
  }
  site.refuse("InvalidArgumentError", "got an unknown reduce op ", static_cast<int>(op.op_),
              ", expected one of torch.distributed.ReduceOp; pass ReduceOp.SUM or another of them");
}

std::string torch_name(c10::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

bool share_bytes(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto x = reinterpret_cast<std::uintptr_t>(a), y = reinterpret_cast<std::uintptr_t>(b);
  return a_bytes != 0 && b_bytes != 0 && x < y + b_bytes && y < x + a_bytes;
}

}  // namespace

void write_back(const WriteBack& pairs) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [tensor, stand_in] : pairs) tensor.copy_(stand_in);
}

void open_span(at::RecordFunction& span, const char* title, at::TensorList inputs) {
  if (!span.isActive()) return;
  span._setAsync();
  const std::vector<c10::IValue> shown(inputs.begin(), inputs.end());
  span.before(title, &shown);
}

// Decides where the call runs. If the device engine's memory is the host's, it serves cpu tensors too.
void Task::place(const Tensor& tensor) {
  if (C10_UNLIKELY(tensor.defined() && site_.devices->serves(tensor.device()))) {
    site_.devices->open(site_, tensor.device());
    on_device_ = true;
    device_ = tensor.device();
  }
  check(tensor);
}

void Task::check(const Tensor& tensor) const {
  if (C10_UNLIKELY(!tensor.defined() || tensor.device() != device_ || tensor.layout() != c10::kStrided)) refuse(tensor);
}

void Task::refuse(const Tensor& tensor) const {
  if (!tensor.defined()) {
    site_.refuse("InvalidArgumentError", "got an undefined tensor, expected one on ", device_,
                 "; pass a tensor with data");
  }
  if (tensor.device() == device_) {
    site_.refuse("InvalidArgumentError", "got a tensor of layout ", tensor.layout(),
                 ", expected a strided one; pass tensor.to_dense()");
  }
  if (type_ != c10::ScalarType::Undefined && (on_device_ || tensor.is_cuda())) {
    site_.refuse("DeviceError", "got tensors on ", device_, " and ", tensor.device(),
                 " in one call, expected one device; move them to the same device");
  }
  site_.refuse("DeviceError", "got a tensor on ", tensor.device(), ", expected one on cpu or cuda; pass tensor.cpu()");
}

void Task::check_type(const Tensor& tensor) const {
  if (C10_LIKELY(tensor.scalar_type() == type_)) return;
  site_.refuse("DtypeError", "got tensors of torch.", torch_name(type_), " and torch.",
               torch_name(tensor.scalar_type()), " in one call, expected one dtype; convert them to the same dtype");
}

void Task::moves(const Tensor& tensor) {
  place(tensor);
  type_ = tensor.scalar_type();
  const auto dtype = engine_dtype(type_);
  call.dtype = dtype.value_or(DType::kUInt8);
  scale_ = dtype ? 1 : tensor.element_size();
}

void Task::reduces(const Tensor& tensor, const c10d::ReduceOp& op) {
  place(tensor);
  type_ = tensor.scalar_type();
  call.reduce_op = engine_op(site_, op);
  const bool linear =
      op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM;
  const bool as_real = linear && c10::isComplexType(type_);
  const auto dtype = engine_dtype(as_real ? c10::toRealValueType(type_) : type_);
  if (!dtype || !supports(*dtype, call.reduce_op)) {
    site_.refuse("DtypeError", "cannot combine torch.", torch_name(type_), " tensors with ", name(call.reduce_op),
                 ", expected a dtype that has this operator; convert the tensor or choose another op");
  }
  call.dtype = *dtype;
  scale_ = as_real ? 2 : 1;
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) premultiply(op);
}

void Task::without_tensor() { on_device_ = site_.devices->connected(); }

void Task::premultiply(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    site_.refuse("InvalidArgumentError", "got ReduceOp.PREMUL_SUM without a factor, expected a number or a tensor of ",
                 "one element; make the op with torch.distributed._make_nccl_premul_sum(factor)");
  }
  const Tensor& factor = supplement->tensor_factor;
  call.factor = factor.defined() ? factor.item<double>() : supplement->double_factor;
}

void Task::root(std::int64_t rank) {
  if (C10_UNLIKELY(rank < 0 || rank >= site_.world_size)) {
    site_.refuse("InvalidArgumentError", "got ", rank, " for the root or peer, expected a rank of this group, 0 to ",
                 site_.world_size - 1, "; pass a rank inside the group");
  }
  call.root = static_cast<int>(rank);
}

void* Task::keep_alive(const Tensor& tensor) {
  if (async_) keep.push_back(tensor);
  return tensor.data_ptr();
}

void* Task::stand_in(const Tensor& tensor, bool read, bool write) {
  if (write && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    site_.refuse("ShapeError", "got an output of shape ", tensor.sizes(), " with strides ", tensor.strides(),
                 ", whose elements share memory, expected one element for each place; pass tensor.clone()");
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor copy = read ? tensor.resolve_conj().resolve_neg().contiguous()
                     : at::empty(tensor.sizes(), tensor.options().memory_format(c10::MemoryFormat::Contiguous));
  copies.push_back(copy);
  if (write) pairs.emplace_back(tensor, copy);
  return copy.data_ptr();
}

const void* Task::reads(const Tensor& tensor) {
  check(tensor);
  check_type(tensor);
  return plain(tensor) ? keep_alive(tensor) : stand_in(tensor, true, false);
}

void* Task::writes(const Tensor& tensor) {
  check(tensor);
  check_type(tensor);
  return plain(tensor) ? keep_alive(tensor) : stand_in(tensor, false, true);
}

void* Task::updates(const Tensor& tensor) {
  check(tensor);
  check_type(tensor);
  return plain(tensor) ? keep_alive(tensor) : stand_in(tensor, true, true);
}

void Task::reads(const Tensors& tensors) {
  call.input_parts.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    call.input_parts.push_back({const_cast<void*>(reads(tensor)), count(tensor)});
  }
}

void Task::writes(const Tensors& tensors) {
  call.output_parts.reserve(tensors.size());
  for (const Tensor& tensor : tensors) call.output_parts.push_back({writes(tensor), count(tensor)});
}

void* Task::own_copy(const void* data, std::size_t nbytes) {
  if (nbytes == 0) return nullptr;
  const auto length = static_cast<std::int64_t>(nbytes);
  auto* source = const_cast<void*>(data);
  const auto bytes = at::TensorOptions(c10::kByte).device(device_);
  copies.push_back(at::for_blob(source, {length}).options(bytes).target_device(device_).make_tensor().clone());
  return copies.back().data_ptr();
}

void Task::separate(std::size_t input_count, std::size_t output_count, bool in_place) {
  const std::size_t width = element_bytes(call.dtype);
  if (in_place || !share_bytes(call.input, input_count * width, call.output, output_count * width)) return;
  call.input = own_copy(call.input, input_count * width);
}

void Task::separate_parts() {
  const std::size_t width = element_bytes(call.dtype);
  const Part one_input{const_cast<void*>(call.input), call.count}, one_output{call.output, call.count};
  const auto inputs = call.input_parts.empty() ? c10::ArrayRef<Part>(one_input) : c10::ArrayRef<Part>(call.input_parts);
  const auto outputs =
      call.output_parts.empty() ? c10::ArrayRef<Part>(one_output) : c10::ArrayRef<Part>(call.output_parts);
  bool clash = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for (std::size_t j = 0; j < outputs.size(); ++j) {
      const Part &in = inputs[i], &out = outputs[j];
      const bool own = call.op != Op::kAllToAll && std::max(i, j) == static_cast<std::size_t>(site_.rank);
      const bool in_place = own && in.data == out.data && in.count == out.count;
      clash |= !in_place && share_bytes(in.data, in.count * width, out.data, out.count * width);
    }
  }
  if (C10_LIKELY(!clash)) return;
  if (call.input_parts.empty()) call.input = own_copy(call.input, call.count * width);
  for (Part& part : call.input_parts) part.data = own_copy(part.data, part.count * width);
}

void Task::split(std::vector<Part>& parts, const Tensor& tensor, void* data, const std::vector<std::int64_t>& rows,
                 const char* side) {
  const std::int64_t height = tensor.dim() == 0 ? 1 : tensor.size(0);
  const auto world_size = static_cast<std::int64_t>(site_.world_size);
  if (rows.empty() ? height % world_size != 0
                   : rows.size() != static_cast<std::size_t>(world_size) ||
                         std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) != height ||
                         std::any_of(rows.begin(), rows.end(), [](std::int64_t n) { return n < 0; })) {
    site_.refuse("ShapeError", "got an ", side, " of ", height, " rows with split sizes ", at::IntArrayRef(rows),
                 ", expected ", world_size, " sizes of 0 or more that add up to the rows, or none and rows divisible ",
                 "by the ranks; correct the split sizes");
  }
  const std::int64_t width = height == 0 ? 0 : tensor.numel() / height;
  char* place = static_cast<char*>(data);
  for (std::int64_t peer = 0; peer < world_size; ++peer) {
    const std::int64_t elements = width * (rows.empty() ? height / world_size : rows[peer]);
    parts.push_back({place, count(elements)});
    place += elements * tensor.element_size();
  }
}

}  // namespace ringcomm
