#include "bind/c10d_streams.h"

#include <dlfcn.h>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>

namespace ringcomm {
namespace {

// A function of the driver, which torch has loaded; null where it has not.
template <typename Function>
Function driver_function(const char* name) {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(driver ? dlsym(driver, name) : nullptr);
}

// torch's generic streams know about capture since 2.13; before, the driver is asked.
[[maybe_unused]] bool driver_is_capturing(void* stream) {
  static const auto is_capturing = driver_function<int (*)(void* stream, int* status)>("cuStreamIsCapturing");
  int status = 0;  // none, active, invalidated
  return is_capturing && is_capturing(stream, &status) == 0 && status != 0;
}

// The calling thread may query within a scope, whatever other threads are capturing.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }

 private:
  void exchange() {
    static const auto exchange_mode = driver_function<int (*)(int* mode)>("cuThreadExchangeStreamCaptureMode");
    if (exchange_mode) exchange_mode(&mode_);
  }
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; then what was before
};

template <typename Stream>
bool is_capturing(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) {
    return stream.is_capturing();
  } else {
    return driver_is_capturing(stream.native_handle());
  }
}

class DeviceStreams final : public Streams {
 public:
  explicit DeviceStreams(c10::Device device) : device_(device), guard_(device.type()), between_(device.type()) {}

  c10::Stream current() const override { return guard_.getStream(device_); }
  c10::Stream side(std::size_t lane) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = side_.find(lane);
    if (found != side_.end()) return found->second;
    return side_.emplace(lane, guard_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true)).first->second;
  }
  std::uintptr_t handle(const c10::Stream& stream) const override {
    return reinterpret_cast<std::uintptr_t>(stream.native_handle());
  }
  bool capturing(const c10::Stream& stream) const override { return is_capturing(stream); }
  Event record(const c10::Stream& stream) const override {
    c10::Event event(device_.type());
    event.record(stream);
    return event;
  }
  void order(const c10::Stream& earlier, const c10::Stream& later) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    between_.record(earlier);
    between_.block(later);
  }
  void keep_until_here(const at::Tensor& tensor, const c10::Stream& stream) const override {
    guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
  void enqueued(Engine&, const c10::Stream&) const override {}

 private:
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  std::mutex mutex_;
  std::map<std::size_t, c10::Stream> side_;
  c10::Event between_;  // recorded again and again: a wait is for the last time before it
};

class HostStreams final : public Streams {
 public:
  c10::Stream current() const override { return c10::Stream(c10::Stream::DEFAULT, c10::kCPU); }
  c10::Stream side(std::size_t) override { return current(); }
  std::uintptr_t handle(const c10::Stream&) const override { return 0; }
  bool capturing(const c10::Stream&) const override { return false; }
  Event record(const c10::Stream&) const override { return std::nullopt; }
  void order(const c10::Stream&, const c10::Stream&) override {}
  void keep_until_here(const at::Tensor&, const c10::Stream&) const override {}
  void enqueued(Engine& engine, const c10::Stream& stream) const override { engine.synchronize(handle(stream)); }
};

}  // namespace

bool reached(const c10::Event& event) {
  const RelaxedCapture relaxed;
  return event.query();
}

void await(const c10::Event& event) {
  for (int look = 0; !reached(event); ++look) {
    if (look < 1000)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::unique_ptr<Streams> device_streams(c10::Device device) { return std::make_unique<DeviceStreams>(device); }
std::unique_ptr<Streams> host_streams() { return std::make_unique<HostStreams>(); }

}  // namespace ringcomm
