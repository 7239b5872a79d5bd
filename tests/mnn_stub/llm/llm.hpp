// As ../MNN/expr/NeuralNetWorkOp.hpp.  What an app does with this stand-in is written to std::cout.
#pragma once

#include <iostream>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include <MNN/expr/NeuralNetWorkOp.hpp>

namespace MNN {
namespace Transformer {

struct PromptImagePart {
    MNN::Express::VARP image_data;
    int width;
    int height;
};

struct PromptAudioPart {
    std::string file_path;
    MNN::Express::VARP waveform;
};

struct MultimodalPrompt {
    std::string prompt_template;
    std::map<std::string, PromptImagePart> images;
    std::map<std::string, PromptAudioPart> audios;
};

class Llm {
public:
    static Llm* createLLM(const std::string& config_path) { return new Llm(config_path); }
    static void destroy(Llm* llm) { delete llm; }
    explicit Llm(std::string config_path) : config_path_(std::move(config_path)) {}
    virtual ~Llm() = default;
    virtual bool load() { return !config_path_.empty(); }
    virtual std::vector<int> tokenizer_encode(const std::string& query) {
        std::cout << "text " << query << "\n";
        return {1};
    }
    virtual std::vector<int> tokenizer_encode(const MultimodalPrompt& prompt) {
        std::cout << "prompt " << prompt.prompt_template << "\n";
        for (const auto& [name, part] : prompt.images) {
            unsigned long sum = 0;
            for (std::size_t i = 0; i < part.image_data->bytes.size(); ++i) {
                sum += (i % 251 + 1) * part.image_data->bytes[i];
            }
            std::cout << name << " " << part.height << " " << part.width << " " << sum << "\n";
        }
        return {2};
    }
    virtual void response(const std::vector<int>& ids, std::ostream* os, const char*, int max) {
        *os << "response " << ids.at(0) << " " << max << "\n";
    }

private:
    std::string config_path_;
};

}  // namespace Transformer
}  // namespace MNN
