// Engines and transports in capsules, which both Python modules exchange.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "core/engine.h"
#include "hierarchy/transport.h"

namespace ringcomm {

template <typename Held>
constexpr const char* kCapsule = nullptr;
template <>
inline constexpr const char* kCapsule<Engine> = "ringcomm.Engine";
template <>
inline constexpr const char* kCapsule<Transport> = "ringcomm.Transport";

// The capsule lets go of `held` without the GIL: an engine and a transport may wait for threads that need it.
template <typename Held>
pybind11::capsule to_capsule(std::shared_ptr<Held> held) {
  return pybind11::capsule(new std::shared_ptr<Held>(std::move(held)), kCapsule<Held>, [](PyObject* capsule) {
    const auto* const owner = static_cast<std::shared_ptr<Held>*>(PyCapsule_GetPointer(capsule, kCapsule<Held>));
    const pybind11::gil_scoped_release release;
    delete owner;
  });
}

template <typename Held>
std::shared_ptr<Held> from_capsule(const pybind11::capsule& capsule) {
  const void* const owner = PyCapsule_GetPointer(capsule.ptr(), kCapsule<Held>);
  if (owner == nullptr) throw pybind11::error_already_set();
  return *static_cast<const std::shared_ptr<Held>*>(owner);
}

}  // namespace ringcomm
