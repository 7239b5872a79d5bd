// Asking a SmolVLM bundle about pictures through MNN's own C++ interface (3.6.1), exactly.
#pragma once

#include <MNN/expr/NeuralNetWorkOp.hpp>
#include <llm/llm.hpp>

#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tiles.hpp"

namespace smolvlm {

// MNN takes a picture as a decoder of files gives it: blue, green, red.
inline MNN::Transformer::PromptImagePart as_part(const Image& image) {
    std::vector<std::uint8_t> bgr(image.pixels.size());
    for (std::size_t i = 0; i < bgr.size(); i += 3) {
        bgr[i] = image.pixels[i + 2];
        bgr[i + 1] = image.pixels[i + 1];
        bgr[i + 2] = image.pixels[i];
    }
    // _Const copies the bytes.
    MNN::Express::VARP data =
        MNN::Express::_Const(bgr.data(), {image.height, image.width, 3}, MNN::Express::NHWC,
                             halide_type_of<std::uint8_t>());
    return {data, image.width, image.height};
}

// One turn: pictures, then a question.  What users type must not steer the engine: of `<img>` it
// would open what stands in it.
inline std::string turn(const std::string& pictures, const std::string& question) {
    for (const char* mark : {"<img>", "<audio>", "<image>", "<|im_start|>", "<end_of_utterance>"}) {
        if (question.find(mark) != std::string::npos) {
            throw std::invalid_argument(std::string("the question holds ") + mark);
        }
    }
    const std::string start = pictures.empty() ? "User: " : "User:" + pictures;
    return "<|im_start|>" + start + question + "<end_of_utterance>\nAssistant:";
}

// Standard profile.  The ids that `tokenizer_encode` gives for tiles are not those the model was
// trained on, so they are thrown away; what counts is that it has encoded each tile.
inline void ask(MNN::Transformer::Llm& llm, const std::vector<Tiles>& pictures,
                const Settings& settings, const std::string& question, std::ostream& answer,
                int max_tokens) {
    std::string block;
    MNN::Transformer::MultimodalPrompt tiles;
    for (const Tiles& picture : pictures) {
        block += picture_text(picture, settings.image_seq_len);
        for (const Image& tile : picture.tiles) {
            const std::string name = "image_" + std::to_string(tiles.images.size());
            tiles.prompt_template += "<img>" + name + "</img>";
            tiles.images[name] = as_part(tile);
        }
    }
    const std::vector<int> ids = llm.tokenizer_encode(turn(block, question));
    if (!pictures.empty()) llm.tokenizer_encode(tiles);
    llm.response(ids, &answer, nullptr, max_tokens);
}

// Canvas profile: each picture is one image, and its place in the text is all there is to say.
inline void ask_with_canvas(MNN::Transformer::Llm& llm, const std::vector<Tiles>& pictures,
                            const std::string& question, std::ostream& answer, int max_tokens) {
    std::string block;
    MNN::Transformer::MultimodalPrompt prompt;
    for (const Tiles& picture : pictures) {
        const std::string name = "image_" + std::to_string(prompt.images.size());
        block += "<img>" + name + "</img>";
        prompt.images[name] = as_part(canvas(picture));
    }
    prompt.prompt_template = turn(block, question);
    llm.response(llm.tokenizer_encode(prompt), &answer, nullptr, max_tokens);
}

}  // namespace smolvlm
