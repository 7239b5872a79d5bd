// A picture as the tiles that SmolVLM and Idefics3 take, as `mnnsmith` and transformers cut them.
//
// The bytes are those of Pillow before version 13, which resized across first, then down.  Pillow 13
// goes down first for some sizes, which rounds some pixels otherwise: by a level, or by up to six at
// hard edges of tiny pictures.
// It needs C++17 and nothing else.  What it is given is decoded and upright, RGB, 8 bits a channel,
// with transparent pixels on white: that is the app's part (on Android: BitmapFactory, and
// ExifInterface for the orientation).  The filter is LANCZOS, which all these models ask for.  On ARM
// compile with -ffp-contract=off: fused operations would round weights otherwise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace smolvlm {

// Of `preprocessor_config.json` and `processor_config.json`, as `mnnsmith.json` repeats them under
// model.vision.processor.  `tile`: max_image_size; `longest_edge`: size; both in pixels.
struct Settings {
    int longest_edge = 2048;
    int tile = 512;
    bool split = true;       // do_image_splitting
    int image_seq_len = 64;  // tokens of a tile
};

// `pixels`: height * width * 3 bytes, row by row.
struct Image {
    int width = 0;
    int height = 0;
    std::vector<std::uint8_t> pixels;
};

// The grid row by row, then the whole picture as one tile; not split: rows = cols = 0, that tile.
struct Tiles {
    int rows = 0;
    int cols = 0;
    std::vector<Image> tiles;
};

namespace detail {

constexpr int kMaxSide = 4096;
constexpr int kLobes = 3;
constexpr int kBits = 22;  // of fixed point, as Pillow has it

inline double sinc(double x) {
    if (x == 0.0) return 1.0;
    x *= 3.14159265358979323846;
    return std::sin(x) / x;
}

inline double lanczos(double x) {
    return x < -kLobes || x >= kLobes ? 0.0 : sinc(x) * sinc(x / kLobes);
}

struct Window {
    int first = 0;
    std::vector<int> weights;
};

// For each of `to` pixels, which of `from` it is made of.
inline std::vector<Window> windows(int from, int to) {
    const double scale = static_cast<double>(from) / to;
    const double stretch = std::max(scale, 1.0);
    const double reach = kLobes * stretch;
    std::vector<Window> found(static_cast<std::size_t>(to));
    for (int i = 0; i < to; ++i) {
        const double center = (i + 0.5) * scale;
        const int first = std::max(0, static_cast<int>(center - reach + 0.5));
        const int last = std::min(from, static_cast<int>(center + reach + 0.5));
        std::vector<double> exact;
        double sum = 0.0;
        for (int x = 0; x < last - first; ++x) {
            exact.push_back(lanczos((x + first - center + 0.5) * (1.0 / stretch)));
            sum += exact.back();
        }
        Window& window = found[static_cast<std::size_t>(i)];
        window.first = first;
        for (double weight : exact) {
            const double fixed = weight / sum * (1 << kBits);
            window.weights.push_back(static_cast<int>(fixed < 0 ? fixed - 0.5 : fixed + 0.5));
        }
    }
    return found;
}

// One pass: `count` lines; neighbours are `step` bytes apart, lines `line`.
inline void pass(const std::uint8_t* from, std::uint8_t* to, const std::vector<Window>& table,
                 int count, std::size_t from_step, std::size_t from_line, std::size_t to_step,
                 std::size_t to_line) {
    for (int n = 0; n < count; ++n) {
        const std::uint8_t* in = from + static_cast<std::size_t>(n) * from_line;
        std::uint8_t* out = to + static_cast<std::size_t>(n) * to_line;
        for (const Window& window : table) {
            for (int channel = 0; channel < 3; ++channel) {
                int sum = 1 << (kBits - 1);
                const std::uint8_t* at =
                    in + static_cast<std::size_t>(window.first) * from_step + channel;
                for (int weight : window.weights) {
                    sum += *at * weight;
                    at += from_step;
                }
                out[channel] = static_cast<std::uint8_t>(std::clamp(sum >> kBits, 0, 255));
            }
            out += to_step;
        }
    }
}

inline std::pair<int, int> first_size(int width, int height, int longest_edge) {
    double ratio = static_cast<double>(width) / height;
    if (width >= height) {
        width = longest_edge;
        height = static_cast<int>(longest_edge / ratio);
        height = std::max(height + height % 2, 1);
    } else {
        height = longest_edge;
        width = static_cast<int>(longest_edge * ratio);
        width = std::max(width + width % 2, 1);
    }
    ratio = static_cast<double>(width) / height;
    if (width >= height && width > kMaxSide) {
        width = kMaxSide;
        height = static_cast<int>(kMaxSide / ratio);
    } else if (height > width && height > kMaxSide) {
        height = kMaxSide;
        width = static_cast<int>(kMaxSide * ratio);
    }
    return {std::max(width, 1), std::max(height, 1)};
}

inline std::pair<int, int> grid_size(int width, int height, int tile) {
    const auto up = [tile](int side) { return (side + tile - 1) / tile * tile; };
    const double ratio = static_cast<double>(width) / height;
    if (width >= height) {
        width = up(width);
        return {width, up(static_cast<int>(width / ratio))};
    }
    height = up(height);
    return {up(static_cast<int>(height * ratio)), height};
}

inline Image part(const Image& image, int left, int top, int side) {
    Image found{side, side, {}};
    found.pixels.reserve(static_cast<std::size_t>(side) * side * 3);
    for (int y = top; y < top + side; ++y) {
        const auto row = image.pixels.begin() +
                         (static_cast<std::ptrdiff_t>(y) * image.width + left) * 3;
        found.pixels.insert(found.pixels.end(), row, row + static_cast<std::ptrdiff_t>(side) * 3);
    }
    return found;
}

}  // namespace detail

// As Pillow's `Image.resize` with LANCZOS: across, then down, each rounded to 8 bits.
inline Image resize(const Image& image, int width, int height) {
    Image wide = image;
    if (width != image.width) {
        wide = {width, image.height, {}};
        wide.pixels.resize(static_cast<std::size_t>(width) * image.height * 3);
        detail::pass(image.pixels.data(), wide.pixels.data(), detail::windows(image.width, width),
                     image.height, 3, static_cast<std::size_t>(image.width) * 3, 3,
                     static_cast<std::size_t>(width) * 3);
    }
    if (height == image.height) return wide;
    Image result{width, height, {}};
    result.pixels.resize(static_cast<std::size_t>(width) * height * 3);
    const std::size_t row = static_cast<std::size_t>(width) * 3;
    detail::pass(wide.pixels.data(), result.pixels.data(), detail::windows(image.height, height),
                 width, row, 3, row, 3);
    return result;
}

inline Tiles cut(const Image& image, const Settings& settings) {
    const std::size_t expected = static_cast<std::size_t>(image.width) * image.height * 3;
    if (image.width < 1 || image.height < 1 || image.pixels.size() != expected) {
        throw std::invalid_argument("not an RGB image");
    }
    const int side = settings.tile;
    const auto first = detail::first_size(image.width, image.height, settings.longest_edge);
    const Image resized = resize(image, first.first, first.second);
    if (!settings.split) return {0, 0, {resize(resized, side, side)}};
    const auto size = detail::grid_size(resized.width, resized.height, side);
    const Image grid = resize(resized, size.first, size.second);
    const int rows = grid.height / side, cols = grid.width / side;
    if (rows == 1 && cols == 1) return {0, 0, {grid}};
    Tiles found{rows, cols, {}};
    for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < cols; ++col) {
            found.tiles.push_back(detail::part(grid, col * side, row * side, side));
        }
    }
    found.tiles.push_back(resize(grid, side, side));
    return found;
}

// For the canvas profile: the grid as it lies, and a row below it that begins with the last tile.
inline Image canvas(const Tiles& picture) {
    if (picture.rows == 0) return picture.tiles.front();
    const int side = picture.tiles.front().width;
    Image found{picture.cols * side, (picture.rows + 1) * side, {}};
    found.pixels.assign(static_cast<std::size_t>(found.width) * found.height * 3, 0);
    for (std::size_t i = 0; i < picture.tiles.size(); ++i) {
        const int row = static_cast<int>(i) / picture.cols, col = static_cast<int>(i) % picture.cols;
        for (int y = 0; y < side; ++y) {
            const auto from = picture.tiles[i].pixels.begin() + static_cast<std::ptrdiff_t>(y) * side * 3;
            const auto to = found.pixels.begin() +
                (static_cast<std::ptrdiff_t>(row * side + y) * found.width + col * side) * 3;
            std::copy(from, from + static_cast<std::ptrdiff_t>(side) * 3, to);
        }
    }
    return found;
}

// What stands for a picture in the text of a prompt.
inline std::string picture_text(const Tiles& picture, int image_seq_len) {
    std::string image;
    for (int i = 0; i < image_seq_len; ++i) image += "<image>";
    const std::string fake = "<fake_token_around_image>";
    std::string text;
    for (int row = 1; row <= picture.rows; ++row) {
        for (int col = 1; col <= picture.cols; ++col) {
            text += fake + "<row_" + std::to_string(row) + "_col_" + std::to_string(col) + ">" + image;
        }
        text += "\n";
    }
    if (picture.rows > 0) text += "\n";
    return text + fake + "<global-img>" + image + fake;
}

}  // namespace smolvlm
