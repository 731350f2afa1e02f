// Turns tensors into one call of an engine: checks, counts in engine elements, contiguous copies, and writing back
// results. It sends nothing.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "core/engine.h"
#include "core/error.h"

namespace ringcomm {

using Tensor = at::Tensor;
using Tensors = std::vector<at::Tensor>;

// An error in the caller's arguments that has its own Python class in ringcomm.errors.
class __attribute__((visibility("default"))) ArgumentError : public Error {
 public:
  ArgumentError(const char* python_class, const std::string& message)
      : Error(ErrorCode::kInvalid, message), python_class_(python_class) {}
  const char* python_class() const { return python_class_; }

 private:
  const char* python_class_;
};

class DeviceGroup;
class Batches;
void abandon_batch(Batches& batches);

// The call and the rank: `title` is the profiler's name of the call, such as "ringcomm:all_reduce".
struct Site {
  static constexpr std::size_t kPrefix = sizeof("ringcomm:") - 1;
  const char* title;
  int rank;
  int world_size;
  DeviceGroup* devices;
  Batches* batches;
  const char* call() const { return title + kPrefix; }
  template <typename... Parts>
  [[noreturn]] void refuse(const char* python_class, const Parts&... parts) const {
    abandon_batch(*batches);
    throw ArgumentError(python_class, concat(call(), ": rank ", rank, " ", parts...));
  }
};

// The engine's time limit in milliseconds; 0 means the communicator's own limit, as a negative or zero limit does in
// c10d.
inline std::int64_t engine_timeout(std::chrono::milliseconds limit) { return limit.count() > 0 ? limit.count() : 0; }

// Copies every stand-in back to the tensor that it replaced.
using WriteBack = std::vector<std::pair<Tensor, Tensor>>;
void write_back(const WriteBack& pairs);

// Begins a profiler's span like torch's own backends: an asynchronous event with the shapes of its inputs.
void open_span(at::RecordFunction& span, const char* title, at::TensorList inputs);

// One call in preparation, on the cpu or on the device of its first tensor, for whose calls the group then prepares.
// Tensors that are not contiguous, or conjugated or negated views, get a contiguous stand-in. On a device all this is
// enqueued on the current stream; only a premul_sum factor that is a tensor there makes the host wait for its value.
class Task {
 public:
  Task(const Site& site, Op op, bool async, std::chrono::milliseconds timeout) : site_(site), async_(async) {
    call.op = op;
    call.timeout_ms = engine_timeout(timeout);
  }

  // Sets the element type of a call that only moves data (as bytes, if the engine lacks the type), or of one that
  // reduces.
  void moves(const Tensor& tensor);
  void reduces(const Tensor& tensor, const c10d::ReduceOp& op);
  // For a call without a tensor: runs on the device once the group has connected there, which then holds for every
  // rank.
  void without_tensor();

  void root(std::int64_t rank);
  std::size_t count(const Tensor& tensor) const { return static_cast<std::size_t>(tensor.numel()) * scale_; }
  std::size_t count(std::int64_t elements) const { return static_cast<std::size_t>(elements) * scale_; }

  // Each checks a tensor and returns its address, for reading, writing, or both.
  const void* reads(const Tensor& tensor);
  void* writes(const Tensor& tensor);
  void* updates(const Tensor& tensor);
  void reads(const Tensors& tensors);   // into call.input_parts
  void writes(const Tensors& tensors);  // into call.output_parts

  // Copies the input if it overlaps the output, unless it is `in_place`, as the engine allows.
  void separate(std::size_t input_count, std::size_t output_count, bool in_place);
  void separate_parts();  // the same for parts, of which only this rank's may be in place, and none in all_to_all

  // Whether the first dimension is divisible by the number of ranks.
  bool even(const Tensor& tensor) const { return tensor.dim() > 0 && tensor.size(0) % site_.world_size == 0; }
  // Splits one tensor along its first dimension into one part for each rank.
  void split(std::vector<Part>& parts, const Tensor& tensor, void* data, const std::vector<std::int64_t>& rows,
             const char* side);

  const Site& site() const { return site_; }
  bool on_device() const { return on_device_; }

  Call call;
  Tensors keep;     // the caller's tensors, which must live until an asynchronous call ends
  Tensors copies;   // copies such as stand-ins, which must live until any call ends
  WriteBack pairs;  // the caller's tensors and their stand-ins

 private:
  void place(const Tensor& tensor);
  void check(const Tensor& tensor) const;
  [[noreturn]] void refuse(const Tensor& tensor) const;
  void check_type(const Tensor& tensor) const;
  bool plain(const Tensor& tensor) const { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }
  void* stand_in(const Tensor& tensor, bool read, bool write);
  void* keep_alive(const Tensor& tensor);
  void* own_copy(const void* data, std::size_t nbytes);
  void premultiply(const c10d::ReduceOp& op);

  Site site_;
  bool async_;
  bool on_device_ = false;
  c10::Device device_ = c10::kCPU;
  c10::ScalarType type_ = c10::ScalarType::Undefined;
  std::size_t scale_ = 1;  // engine elements per tensor element
};

}  // namespace ringcomm
