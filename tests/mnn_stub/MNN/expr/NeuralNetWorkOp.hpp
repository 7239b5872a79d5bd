// The parts of MNN's headers that the examples use, so that they compile without MNN: the same names
// and signatures as MNN 3.6.1, and no computation.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

struct halide_type_t {
    int bits;
};

template <typename T>
halide_type_t halide_type_of() {
    return {static_cast<int>(8 * sizeof(T))};
}

namespace MNN {
namespace Express {

enum Dimensionformat { NHWC, NC4HW4, NCHW };

struct Variable {
    std::vector<std::uint8_t> bytes;
    std::vector<int> shape;
};
using VARP = std::shared_ptr<Variable>;

inline VARP _Const(const void* data, std::vector<int> shape, Dimensionformat, halide_type_t type) {
    std::size_t size = static_cast<std::size_t>(type.bits) / 8;
    for (int side : shape) size *= static_cast<std::size_t>(side);
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    return std::make_shared<Variable>(Variable{{bytes, bytes + size}, shape});
}

}  // namespace Express
}  // namespace MNN
