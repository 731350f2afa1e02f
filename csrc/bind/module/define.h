// The parts of `_C`, each in its own file.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "core/engine.h"

namespace ringcomm {

void define_simulate(pybind11::module_& m);
void define_trace(pybind11::module_& m);
void define_hierarchy(pybind11::module_& m);
void define_nccl(pybind11::module_& m);
void define_pool(pybind11::module_& m);
void define_record(pybind11::module_& m);
void define_training(pybind11::module_& m);

// Shares an engine such that its destruction releases the GIL: it may wait for its own threads, which may need the GIL.
std::shared_ptr<Engine> share_beside_python(std::unique_ptr<Engine> engine);

}  // namespace ringcomm
