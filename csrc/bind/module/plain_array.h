// Plain arrays: contiguous memory, in the engine's kind of memory, of an element type that the engine has. A torch
// tensor is read through DLPack's C exchange interface, a NumPy array or any other cpu array through the buffer
// protocol; either takes some tens of nanoseconds.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "core/types.h"

namespace ringcomm {

// The parts of DLPack 1.3 that are read here (dlpack.h: DLTensor, DLPackExchangeAPI); the layout is fixed within major
// version 1.
struct DlTensor {
  void* data;
  std::int32_t device_type, device_id, num_dims;
  std::uint8_t type_code, bits;
  std::uint16_t lanes;
  const std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
struct DlExchange {
  std::uint32_t major, minor;
  void* unused[4];
  int (*borrow)(PyObject* array, DlTensor* out);
  int (*current_work_stream)(int device_type, std::int32_t device_id, void** stream);
};
static_assert(std::is_same_v<Py_ssize_t, std::int64_t>, "shapes of buffers and of DLPack are the same numbers");

inline std::optional<DType> dtype_of(const DlTensor& tensor) {
  if (tensor.lanes != 1) return std::nullopt;
  switch (tensor.type_code << 8 | tensor.bits) {
    case 0x008:
      return DType::kInt8;
    case 0x010:
      return DType::kInt16;
    case 0x020:
      return DType::kInt32;
    case 0x040:
      return DType::kInt64;
    case 0x108:
      return DType::kUInt8;
    case 0x110:
      return DType::kUInt16;
    case 0x120:
      return DType::kUInt32;
    case 0x140:
      return DType::kUInt64;
    case 0x210:
      return DType::kFloat16;
    case 0x220:
      return DType::kFloat32;
    case 0x240:
      return DType::kFloat64;
    case 0x410:
      return DType::kBFloat16;
    case 0x608:
      return DType::kBool;
    case 0xa08:
      return DType::kFloat8E4M3;
    case 0xc08:
      return DType::kFloat8E5M2;
    default:
      return std::nullopt;
  }
}

// Returns the type of a buffer with native elements, from the struct module's format letter.
inline std::optional<DType> dtype_of(const Py_buffer& view) {
  const char* format = view.format == nullptr ? "B" : view.format;
  if (format[0] == '@' || format[0] == '=') ++format;
  if (format[0] == '\0' || format[1] != '\0') return std::nullopt;
  switch (format[0]) {
    case 'f':
      return DType::kFloat32;
    case 'd':
      return DType::kFloat64;
    case 'e':
      return DType::kFloat16;
    case 'B':
      return DType::kUInt8;
    case 'b':
      return DType::kInt8;
    case '?':
      return DType::kBool;
    case 'h':
      return DType::kInt16;
    case 'i':
      return DType::kInt32;
    case 'l':
    case 'q':
      return view.itemsize == 8 ? DType::kInt64 : DType::kInt32;
    case 'H':
      return DType::kUInt16;
    case 'I':
      return DType::kUInt32;
    case 'L':
    case 'Q':
      return view.itemsize == 8 ? DType::kUInt64 : DType::kUInt32;
    default:
      return std::nullopt;
  }
}

class PlainArray {
 public:
  PlainArray() = default;
  PlainArray(const PlainArray&) = delete;
  PlainArray& operator=(const PlainArray&) = delete;
  ~PlainArray() { PyBuffer_Release(&view_); }

  // Reads an array's facts. `device`: a CUDA device, or -1 for the cpu. Returns false, with no Python error set, if
  // `array` is not plain, or is elsewhere. The array must outlive this object.
  bool read(PyObject* array, bool writable, int device) {
    exchange_ = exchange_of(Py_TYPE(array));
    device_ = device;
    const bool plain = exchange_ != nullptr ? read_tensor(array) : device < 0 && read_buffer(array, writable);
    if (!plain) PyErr_Clear();
    return plain;
  }

  // Finds the stream that the array's library currently uses on the array's device. Returns false, with no Python error
  // set, if the library does not tell.
  bool find_stream(std::uintptr_t& stream) const { return ask_stream(exchange_, device_, stream); }

  // The stream that the library of `array` currently uses on a CUDA device, if it tells.
  static std::optional<std::uintptr_t> work_stream(PyObject* array, int device) {
    std::uintptr_t stream = 0;
    const DlExchange* const exchange = exchange_of(Py_TYPE(array));
    if (exchange == nullptr || !ask_stream(exchange, device, stream)) return std::nullopt;
    return stream;
  }

  // Whether `array`, which was read, keeps its memory as long as it lives. Other buffers, such as a bytearray, may be
  // resized once they are no longer exported.
  bool keeps_memory(PyObject* array) const {
    return has_exchange() || std::strcmp(Py_TYPE(array)->tp_name, "numpy.ndarray") == 0;
  }
  // Whether the array was read through DLPack's C exchange interface, as torch's tensors are.
  bool has_exchange() const { return exchange_ != nullptr; }
  char* data() const { return data_; }
  DType dtype() const { return dtype_; }
  std::size_t count() const { return static_cast<std::size_t>(count_); }
  std::size_t nbytes() const { return count() * element_bytes(dtype_); }
  int num_dims() const { return num_dims_; }
  std::int64_t extent(int dim) const { return shape_[dim]; }

  // Whether the last `num_dims` extents of both are equal.
  bool ends_like(const PlainArray& other, int num_dims) const {
    return std::equal(shape_ + num_dims_ - num_dims, shape_ + num_dims_, other.shape_ + other.num_dims_ - num_dims);
  }
  bool has_shape_of(const PlainArray& other) const {
    return num_dims_ == other.num_dims_ && ends_like(other, num_dims_);
  }
  // Whether the shape is that of `parts` arrays like `part`: stacked, or concatenated along dimension 0.
  bool holds(const PlainArray& part, std::int64_t parts) const {
    if (num_dims_ == part.num_dims_ + 1) return extent(0) == parts && ends_like(part, part.num_dims_);
    return num_dims_ == part.num_dims_ && num_dims_ > 0 && extent(0) == parts * part.extent(0) &&
           ends_like(part, num_dims_ - 1);
  }
  bool overlaps(const PlainArray& other) const {
    return data_ < other.data_ + other.nbytes() && other.data_ < data_ + nbytes();
  }

 private:
  // Returns the interface that the type itself has, not an inherited one: a subclass of torch.Tensor may have no memory
  // of its own.
  static const DlExchange* exchange_of(PyTypeObject* type) {
    static PyObject* const key = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    constexpr const char* kName = "dlpack_exchange_api";
    PyObject* const capsule = type->tp_dict == nullptr ? nullptr : PyDict_GetItemWithError(type->tp_dict, key);
    if (capsule == nullptr || !PyCapsule_IsValid(capsule, kName)) return nullptr;
    const auto* const exchange = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule, kName));
    return exchange->major == 1 ? exchange : nullptr;
  }

  static bool ask_stream(const DlExchange* exchange, int device, std::uintptr_t& stream) {
    void* found = nullptr;
    const bool known =
        exchange->current_work_stream != nullptr && exchange->current_work_stream(kDlCuda, device, &found) == 0;
    if (!known) PyErr_Clear();
    stream = reinterpret_cast<std::uintptr_t>(found);
    return known;
  }

  bool read_tensor(PyObject* array) {
    DlTensor tensor;
    if (exchange_->borrow == nullptr || exchange_->borrow(array, &tensor) != 0 || flips_sign(array)) return false;
    if (device_ < 0 ? tensor.device_type != kDlCpu : tensor.device_type != kDlCuda || tensor.device_id != device_)
      return false;
    for (int dim = tensor.num_dims - 1; dim >= 0; --dim) {
      if (tensor.strides != nullptr && tensor.shape[dim] != 1 && tensor.strides[dim] != count_) return false;
      count_ *= tensor.shape[dim];
    }
    if (tensor.data == nullptr && count_ != 0) return false;
    if (tensor.bits == 8 && tensor.type_code <= 1 && !fills_bytes(array)) return false;
    return keep(static_cast<char*>(tensor.data) + tensor.byte_offset, tensor.shape, tensor.num_dims, dtype_of(tensor));
  }

  // DLPack cannot express torch's views whose elements are the negatives of those in memory.
  static bool flips_sign(PyObject* tensor) {
    static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
    PyObject* const answer = PyObject_CallMethodNoArgs(tensor, is_neg);
    Py_XDECREF(answer);
    return answer != Py_False;
  }

  // False for torch's integers of 1 to 7 bits, which DLPack describes as integers of 8.
  static bool fills_bytes(PyObject* tensor) {
    static PyObject* const name = PyUnicode_InternFromString("dtype");
    static PyObject *int8 = nullptr, *uint8 = nullptr;
    PyObject* const dtype = PyObject_GetAttr(tensor, name);
    if (dtype == nullptr) return false;
    Py_DECREF(dtype);  // torch keeps its types
    if (dtype == int8 || dtype == uint8) return true;
    PyObject* const text = PyObject_Str(dtype);
    const char* const said = text == nullptr ? nullptr : PyUnicode_AsUTF8(text);
    if (said != nullptr && std::strcmp(said, "torch.int8") == 0) int8 = dtype;
    if (said != nullptr && std::strcmp(said, "torch.uint8") == 0) uint8 = dtype;
    Py_XDECREF(text);
    return dtype == int8 || dtype == uint8;
  }

  // NumPy's masked arrays mean less than their buffer holds.
  static bool is_masked(PyObject* array) {
    static PyObject* const mask = PyUnicode_InternFromString("mask");
    return PyType_HasFeature(Py_TYPE(array), Py_TPFLAGS_HEAPTYPE) && PyObject_HasAttr(array, mask);
  }

  bool read_buffer(PyObject* array, bool writable) {
    const int flags = (writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) | PyBUF_FORMAT;
    if (is_masked(array) || !PyObject_CheckBuffer(array) || PyObject_GetBuffer(array, &view_, flags) != 0) return false;
    if (view_.itemsize != 0) count_ = view_.len / view_.itemsize;
    return keep(view_.buf, view_.shape, view_.ndim, dtype_of(view_));
  }

  bool keep(void* data, const std::int64_t* shape, int num_dims, std::optional<DType> dtype) {
    data_ = static_cast<char*>(data);
    shape_ = shape;
    num_dims_ = num_dims;
    dtype_ = dtype.value_or(DType::kUInt8);
    return dtype.has_value();
  }

  static constexpr int kDlCpu = 1, kDlCuda = 2;

  const DlExchange* exchange_ = nullptr;
  int device_ = -1;
  char* data_ = nullptr;
  const std::int64_t* shape_ = nullptr;
  int num_dims_ = 0;
  DType dtype_ = DType::kUInt8;
  std::int64_t count_ = 1;
  Py_buffer view_{};  // holds the memory of an array read through the buffer protocol
};

}  // namespace ringcomm
